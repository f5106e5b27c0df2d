// Multiplies a few tokens by single weights on the tensor cores, reading only those that are kept.
//
// A step of a warp is a tile of 16·ROWS outputs × 64 inputs. Its weights are spread over a tile of zeros in shared memory, in
// which they lie as the lanes of the tensor cores hold them, and after the products their places are zeros again. A step has
// 32·SLOTS places, 12 bits each; where it has fewer weights, one is put down several times. At 90% zeros the tensor cores
// multiply ten times more than they must, and still have time to spare. What is short of it is shared memory: with 16 tokens,
// to fetch their inputs for every weight would take 32 bytes for each; the tile takes 20, and two stores.
//
// A block of threads takes a strip of 16·ROWS outputs, one of SPLITS shares of its steps, and TILES·8 tokens; its WARPS take the
// steps in turn, AHEAD of them being on their way. The shares of a strip are a cluster, whose sums are added up in its order.

constexpr int THREADS = 32 * WARPS, R = 16 * ROWS, TOKENS = TILES * 8, VALUES = (SLOTS + 1) / 2, PLACES = (SLOTS * 12 + 31) / 32;
static_assert(AHEAD > 1, "the next step is on its way while one is taken");
constexpr int PITCH = R + 4;  // of a token's sums, for the banks' sake
constexpr int REGION = TOKENS * PITCH * 4 > R * 128 ? TOKENS * PITCH * 4 : R * 128;  // a warp's tile, and later its sums

struct SpreadArguments {
    const u16* x;
    const u32* values;  // [steps, VALUES, 32 lanes], two weights
    const u32* places;  // [steps, PLACES, 32 lanes]
    const int* columns;
    const int* starts;
    const float* bias;
    u16* y;
    i64 stride;
    int tokens, inputs, outputs, unused;
};

// Of 64 inputs, twice eight neighbours for each lane: the second operands of four products. The tile's places follow suit.
INLINE void tokens_of(const SpreadArguments& p, int first, int column, u32 (&w)[TILES][8]) {
    const int lane = threadIdx.x % 32;
    column += lane % 4 * 8;
    #pragma unroll
    for (int n = 0; n < TILES; n++) {
        const int token = first + n * 8 + lane / 4;
        const u16* from = p.x + token * p.stride;
#if ALIGNED
        uint4 a = make_uint4(0, 0, 0, 0), b = a;
        if (token < p.tokens && column < p.inputs) a = *reinterpret_cast<const uint4*>(from + column);
        if (token < p.tokens && column + 32 < p.inputs) b = *reinterpret_cast<const uint4*>(from + column + 32);
        w[n][0] = a.x, w[n][1] = a.y, w[n][2] = a.z, w[n][3] = a.w;
        w[n][4] = b.x, w[n][5] = b.y, w[n][6] = b.z, w[n][7] = b.w;
#else
        #pragma unroll
        for (int i = 0; i < 8; i++) w[n][i] = token < p.tokens ? two_inputs(from, column + 2 * i + i / 4 * 24, p.inputs) : 0;
#endif
    }
}

// The place of a lane's weight i, 12 bits of all that follow each other.
INLINE u32 place(const u32 (&q)[PLACES], int i) {
    const int word = i * 12 / 32, bit = i * 12 % 32;
    return (bit > 20 ? __funnelshift_r(q[word], q[(word + 1) % PLACES], bit) : q[word] >> bit) & 4095;
}

INLINE void finish(const SpreadArguments& p, int first, int strip, int i, float z) {
    const int out = strip * R + i % R, token = first + i / R;
    if (out < p.outputs && token < p.tokens) p.y[i64(token) * p.outputs + out] = rounded(activate(z + p.bias[out]));
}

extern "C" __global__ void __launch_bounds__(THREADS, TILES > 2 || WARPS > 16 ? 1 : (ROWS > 2 ? 16 : 24) / WARPS) spread_linear(const SpreadArguments p) {
    SHARED_MEMORY(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int strip = blockIdx.x / SPLITS, first = blockIdx.y * TOKENS;
    u16* tile = reinterpret_cast<u16*>(memory + warp * REGION);
    int step = p.starts[blockIdx.x] + warp;
    const int end = p.starts[blockIdx.x + 1];
    let_next_begin();
    u32 v[AHEAD][VALUES], q[AHEAD][PLACES];
    int column[AHEAD];
    const auto load = [&](int a, int at) {
        if (at >= end) return;
        #pragma unroll
        for (int i = 0; i < PLACES; i++) q[a][i] = load4(p.places + (i64(at) * PLACES + i) * 32 + lane);
        #pragma unroll
        for (int i = 0; i < VALUES; i++) v[a][i] = load4(p.values + (i64(at) * VALUES + i) * 32 + lane);
        column[a] = p.columns[at] * 64;
    };
    const auto spread = [&](int a) {
        #pragma unroll
        for (int i = 0; i < SLOTS; i++) tile[place(q[a], i)] = u16(i % 2 ? v[a][i / 2] >> 16 : v[a][i / 2]);
    };
    #pragma unroll
    for (int a = 0; a < AHEAD; a++) load(a, step + a * WARPS);
    #pragma unroll
    for (int i = 0; i < R / 4; i++) reinterpret_cast<uint4*>(tile)[i * 32 + lane] = make_uint4(0, 0, 0, 0);
    float c[ROWS][TILES][4] = {};
    u32 w[TILES][8];
    __syncwarp();
    if (step < end) spread(0);
    wait_for_previous();
    if (step < end) tokens_of(p, first, column[0], w);
    while (step < end) {
        #pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (step >= end) break;
            __syncwarp();
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                #pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const uint4 part = reinterpret_cast<const uint4*>(tile)[(j * ROWS + r) * 32 + lane];
                    #pragma unroll
                    for (int n = 0; n < TILES; n++) multiply(c[r][n], part, make_uint2(w[n][2 * j], w[n][2 * j + 1]));
                }
            }
            step += WARPS;
            const int next = (a + 1) % AHEAD;
            if (step < end) tokens_of(p, first, column[next], w);
            __syncwarp();
            #pragma unroll
            for (int i = 0; i < SLOTS; i++) tile[place(q[a], i)] = 0;
            load(a, step + (AHEAD - 1) * WARPS);
            __syncwarp();
            if (step < end) spread(next);
        }
    }
    __syncwarp();
    float* sums = reinterpret_cast<float*>(tile);  // [TOKENS, PITCH]
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        #pragma unroll
        for (int n = 0; n < TILES; n++) {
            #pragma unroll
            for (int k = 0; k < 4; k++)
                sums[(n * 8 + lane % 4 * 2 + k % 2) * PITCH + r * 16 + lane / 4 + k / 2 * 8] = c[r][n][k];
        }
    }
    __syncthreads();
    float* all = reinterpret_cast<float*>(memory);
    for (int i = threadIdx.x; i < TOKENS * R; i += THREADS) {
        float* at = all + i / R * PITCH + i % R;
        float total = 0.f;
        #pragma unroll
        for (int k = 0; k < WARPS; k++) total += at[k * (REGION / 4)];
#if SPLITS == 1
        finish(p, first, strip, i, total);
#else
        *at = total;
#endif
    }
#if SPLITS > 1
    meet();
    for (int i = blockIdx.x % SPLITS * THREADS + threadIdx.x; i < TOKENS * R; i += SPLITS * THREADS) {
        float total = 0.f;
        #pragma unroll
        for (int k = 0; k < SPLITS; k++) total += of_other(all + i / R * PITCH + i % R, k);
        finish(p, first, strip, i, total);
    }
    meet();
#endif
}
