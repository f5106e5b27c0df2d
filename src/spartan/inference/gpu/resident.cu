// Multiplies many tokens by a weight in blocks of 16×16 and larger, the tokens held in shared memory.
//
// A block of threads holds all inputs of TOKENS tokens and goes through the strips of 16·ROWS outputs, or one of gridDim.y
// shares of them: tokens are read once, whatever the blocks. A warp takes neighbouring strips, and multiplies every step
// (16 inputs) by all the tokens. AHEAD steps are on their way at a time.

struct ResidentArguments {
    const u16* x;
    const uint4* weight;
    const int* columns;
    const int* starts;
    const float* bias;
    u16* y;
    i64 stride;
    int tokens, inputs, outputs, strips;
};

constexpr int THREADS = 32 * WARPS, WIDTH = INPUTS + 8;  // a row of shared memory: 16 bytes more, for the banks' sake

INLINE void hold(const ResidentArguments& p, u16* held, int first) {
    const int each = INPUTS / 8;
    for (int i = threadIdx.x; i < TOKENS * each; i += THREADS) {
        const int token = i / each, column = i % each * 8;
        const u16* from = p.x + i64(first + token) * p.stride + column;
        u16* to = held + token * WIDTH + column;
        if (first + token >= p.tokens) {
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
            continue;
        }
#if ALIGNED
        copy16(to, from);
#else
        #pragma unroll
        for (int k = 0; k < 8; k++) to[k] = column + k < p.inputs ? from[k] : u16(0);
#endif
    }
    wait_for_copies();
}

INLINE void put(const ResidentArguments& p, float (&c)[ROWS][TOKENS / 16][2][4], float (&b)[ROWS][4], int first, int strip) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int out = (strip * ROWS + r) * 16 + lane % 4 * 4;
        #pragma unroll
        for (int m = 0; m < TOKENS / 16; m++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                const int token = first + m * 16 + h * 8 + lane / 4;
                u32 v[4];
                #pragma unroll
                for (int i = 0; i < 4; i++) v[i] = rounded(activate(c[r][m][i / 2][h * 2 + i % 2] + b[r][i]));
                if (token >= p.tokens) continue;
                u16* to = p.y + i64(token) * p.outputs + out;
                if (p.outputs % 4 == 0) {
                    if (out < p.outputs) *reinterpret_cast<uint2*>(to) = make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
                } else {
                    #pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (out + i < p.outputs) to[i] = u16(v[i]);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) resident_linear(const ResidentArguments p) {
    SHARED_MEMORY(memory);
    u16* held = reinterpret_cast<u16*>(memory);
    const int lane = threadIdx.x % 32, first = blockIdx.x * TOKENS;
    const int worker = blockIdx.y * WARPS + threadIdx.x / 32, workers = gridDim.y * WARPS;
    const int low_strip = i64(p.strips) * worker / workers, high_strip = i64(p.strips) * (worker + 1) / workers;
    int step = p.starts[low_strip];
    const int last = p.starts[high_strip];
    let_next_begin();
    uint4 w[AHEAD][ROWS];
    int column[AHEAD];
    const auto load = [&](int i, int at) {
        if (at >= last) return;
        #pragma unroll
        for (int r = 0; r < ROWS; r++) w[i][r] = load16(p.weight + (i64(at) * ROWS + r) * 32 + lane);
        column[i] = p.columns[at];
    };
    #pragma unroll
    for (int i = 0; i < AHEAD; i++) load(i, step + i);
    wait_for_previous();
    hold(p, held, first);
    __syncthreads();
    const u32 mine = shared_address(held) + (lane % 16 * WIDTH + lane / 16 * 8) * 2;
    int end = low_strip < high_strip ? p.starts[low_strip + 1] : 0;
    for (int strip = low_strip; strip < high_strip; strip++) {
        // Asked for long before they are needed.
        const int next_end = strip + 1 < high_strip ? p.starts[strip + 2] : 0;
        float b[ROWS][4];
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const int out = (strip * ROWS + r) * 16 + lane % 4 * 4 + i;
                b[r][i] = out < p.outputs ? p.bias[out] : 0.f;
            }
        }
        float c[ROWS][TOKENS / 16][2][4] = {};
        for (; step < end; step++) {
            const u32 at = mine + column[0] * 32;
            #pragma unroll
            for (int m = 0; m < TOKENS / 16; m++) {
                const uint4 a = matrices(at + m * 32 * WIDTH);
                #pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    multiply(c[r][m][0], a, make_uint2(w[0][r].x, w[0][r].y));
                    multiply(c[r][m][1], a, make_uint2(w[0][r].z, w[0][r].w));
                }
            }
            #pragma unroll
            for (int i = 0; i + 1 < AHEAD; i++) {
                #pragma unroll
                for (int r = 0; r < ROWS; r++) w[i][r] = w[i + 1][r];
                column[i] = column[i + 1];
            }
            load(AHEAD - 1, step + AHEAD);
        }
        put(p, c, b, first, strip);
        end = next_end;
    }
}
