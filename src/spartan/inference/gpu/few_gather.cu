// Multiplies two to 64 tokens by single weights, reading only those that are kept, on the tensor cores.
//
// A step of a warp is 32 weights: two of each of 16 rows. Their inputs are gathered from shared memory, lane 2r + s giving the
// address of those for weight s of row r; that makes the second operand of a product, 32 inputs by 8 tokens. Of the first
// operand, 16 rows by 32, only inputs 2r and 2r + 1 of row r are not zero: at most two of four, so that it is one for the
// sparse tensor cores, and the positions that these ask for are always the same.
//
// A block of threads takes GROUPS groups of 16 rows, a window of WINDOW inputs (at most 2048) and TILES·8 tokens. In shared
// memory an input's 8 tokens are 16 bytes; at step i lane l reads an input whose last three bits are (l xor i) mod 8, so that
// eight lanes read from different banks, and the bits above take 8. A warp takes one of SHARES shares of
// a group, AHEAD chunks of eight steps being on their way. The WINDOWS windows are a cluster, whose sums are added up in its
// order.

constexpr int R = GROUPS * 16, TOKENS = TILES * 8, THREADS = 32 * GROUPS * SHARES;

struct GatherArguments {
    const u16* x;
    const uint4* values;  // [chunks, 8, 4]: of rows g and g + 8, two weights of each of eight steps
    const uint2* places;  // [chunks, 32 lanes], of eight steps
    const int* starts;
    const u8* spots;
    const float* bias;
    u16* y;
    i64 stride;
    int tokens, inputs, outputs, unused;
};

// The window's inputs, those of eight tokens after the other: [TILES, WINDOW, 8].
INLINE void hold(const GatherArguments& p, u16* held, int first, int begin) {
    const int columns = min(WINDOW, p.inputs - begin);
    #pragma unroll 2
    for (int i = threadIdx.x; i < TILES * WINDOW / 2; i += THREADS) {
        const int tile = i / (WINDOW / 2), column = i % (WINDOW / 2) * 2, token = first + tile * 8;
        u32 v[8];
        #pragma unroll
        for (int t = 0; t < 8; t++)
            v[t] = token + t < p.tokens ? two_inputs(p.x + (token + t) * p.stride + begin, column, columns) : 0;
        uint4 a, b;
        a.x = __byte_perm(v[0], v[1], 0x5410), b.x = __byte_perm(v[0], v[1], 0x7632);
        a.y = __byte_perm(v[2], v[3], 0x5410), b.y = __byte_perm(v[2], v[3], 0x7632);
        a.z = __byte_perm(v[4], v[5], 0x5410), b.z = __byte_perm(v[4], v[5], 0x7632);
        a.w = __byte_perm(v[6], v[7], 0x5410), b.w = __byte_perm(v[6], v[7], 0x7632);
        // Of eight neighbours four begin with the second input: they write to different banks.
        uint4* to = reinterpret_cast<uint4*>(held) + tile * WINDOW + column;
        const int swap = threadIdx.x / 4 % 2;
        to[swap] = swap ? b : a;
        to[1 - swap] = swap ? a : b;
    }
}

INLINE void finish(const GatherArguments& p, int first, int strip, int row, int token, float z) {
    const int out = strip * R + row;
    if (out >= p.outputs || first + token >= p.tokens) return;
    p.y[i64(first + token) * p.outputs + out] = rounded(activate(z + p.bias[out]));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) gather_linear(const GatherArguments p) {
    SHARED_MEMORY(memory);
    float* sums = reinterpret_cast<float*>(memory);  // [SHARES, TOKENS, R]
    u16* held = reinterpret_cast<u16*>(sums + SHARES * TOKENS * R);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int window = blockIdx.x % WINDOWS, strip = blockIdx.x / WINDOWS, first = blockIdx.y * TOKENS;
    const int group = warp / SHARES, share = warp % SHARES, cell = blockIdx.x * GROUPS + group;
    int chunk = p.starts[cell * SHARES + share];
    const int end = p.starts[cell * SHARES + share + 1];
    let_next_begin();
    // Lane t = g / 2 of the four of row g holds its weights, and those of row g + 8; the others hold zeros.
    const bool holds = lane % 4 == lane / 8;
    uint4 v[AHEAD][4] = {};
    uint2 d[AHEAD];
    const auto load = [&](int a, int at) {
        if (at >= end) return;
        d[a] = load8(p.places + i64(at) * 32 + lane);
        if (holds) {
            #pragma unroll
            for (int k = 0; k < 4; k++) v[a][k] = load16(p.values + (i64(at) * 8 + lane / 4) * 4 + k);
        }
    };
    #pragma unroll
    for (int a = 0; a < AHEAD; a++) load(a, chunk + a);
    const int spot0 = p.spots[cell * 16 + lane / 4], spot1 = p.spots[cell * 16 + lane / 4 + 8];
    const u32 positions = lane / 4 % 2 ? 0xEEEEEEEEu : 0x44444444u, begin = shared_address(held) + lane % 8 * 16;
    wait_for_previous();
    hold(p, held, first, window * WINDOW);
    __syncthreads();
    float c[TILES][4] = {};
    while (chunk < end) {
        #pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (chunk + a >= end) break;
            const u32 upper[8] = {v[a][0].x, v[a][0].y, v[a][0].z, v[a][0].w, v[a][1].x, v[a][1].y, v[a][1].z, v[a][1].w};
            const u32 lower[8] = {v[a][2].x, v[a][2].y, v[a][2].z, v[a][2].w, v[a][3].x, v[a][3].y, v[a][3].z, v[a][3].w};
            const u32 place[2] = {d[a].x, d[a].y};
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                const u32 at = (begin + __byte_perm(place[i / 4], 0, 0x4440 + i % 4) * 128) ^ i * 16;
                #pragma unroll
                for (int n = 0; n < TILES; n++) multiply_sparse(c[n], upper[i], lower[i], turned_matrices(at + n * WINDOW * 16), positions);
            }
            load(a, chunk + a + AHEAD);
        }
        chunk += AHEAD;
    }
    #pragma unroll
    for (int n = 0; n < TILES; n++) {
        #pragma unroll
        for (int k = 0; k < 4; k++)
            sums[(share * TOKENS + n * 8 + lane % 4 * 2 + k % 2) * R + (k / 2 ? spot1 : spot0)] = c[n][k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TOKENS * R; i += THREADS) {
        float total = 0.f;
        #pragma unroll
        for (int s = 0; s < SHARES; s++) total += sums[s * TOKENS * R + i];
#if WINDOWS == 1
        finish(p, first, strip, i % R, i / R, total);
#else
        sums[i] = total;
#endif
    }
#if WINDOWS > 1
    meet();
    for (int i = window * THREADS + threadIdx.x; i < TOKENS * R; i += WINDOWS * THREADS) {
        float total = 0.f;
        #pragma unroll
        for (int w = 0; w < WINDOWS; w++) total += of_other(sums + i, w);
        finish(p, first, strip, i % R, i / R, total);
    }
    meet();
#endif
}
