// Multiplies one to 64 tokens by a weight in blocks of 16×16 and larger, reading only those that are kept.
//
// A block of threads takes one strip of 16·ROWS outputs and 16·TILES tokens; its WARPS take the strip's steps in turn. A step
// is 16 inputs: ROWS operands of the tensor cores, 16 bytes a lane, stored in the order in which the lanes hold them. UNROLL
// steps are on their way at a time. With EIGHT there are at most 8 tokens.

struct BlockArguments {
    const u16* x;
    const uint4* weight;
    const int* columns;
    const int* starts;
    const float* bias;
    u16* y;
    i64 stride;
    int tokens, inputs, outputs, unused;
};

// 16 tokens' 16 inputs, as the first operand of a product.
INLINE uint4 operand(const BlockArguments& p, int token, int column) {
    const int lane = threadIdx.x % 32;
    token += lane / 4;
    column += lane % 4 * 2;
    uint4 a = make_uint4(0, 0, 0, 0);
    const u16* from = p.x + token * p.stride;
    if (token < p.tokens) {
        a.x = two_inputs(from, column, p.inputs);
        a.z = two_inputs(from, column + 8, p.inputs);
    }
    if (!EIGHT && token + 8 < p.tokens) {
        a.y = two_inputs(from + 8 * p.stride, column, p.inputs);
        a.w = two_inputs(from + 8 * p.stride, column + 8, p.inputs);
    }
    return a;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) block_linear(const BlockArguments p) {
    __shared__ float sums[WARPS][ROWS][TILES][256];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.y * TILES * 16;
    const int end = p.starts[blockIdx.x + 1];
    int step = p.starts[blockIdx.x] + warp;
    let_next_begin();
    uint4 w[UNROLL][ROWS];
    int column[UNROLL];
    const auto load = [&](int u, int at) {
        if (at >= end) return;
        #pragma unroll
        for (int r = 0; r < ROWS; r++) w[u][r] = load16(p.weight + (i64(at) * ROWS + r) * 32 + lane);
        column[u] = p.columns[at];
    };
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) load(u, step + u * WARPS);
    float c[ROWS][TILES][2][4] = {};
    wait_for_previous();
    for (; step < end; step += UNROLL * WARPS) {
        uint4 a[UNROLL][TILES];
        #pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (step + u * WARPS < end) {
                #pragma unroll
                for (int m = 0; m < TILES; m++) a[u][m] = operand(p, first + m * 16, column[u] * 16);
            }
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (step + u * WARPS < end) {
                #pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    #pragma unroll
                    for (int m = 0; m < TILES; m++) {
                        multiply(c[r][m][0], a[u][m], make_uint2(w[u][r].x, w[u][r].y));
                        multiply(c[r][m][1], a[u][m], make_uint2(w[u][r].z, w[u][r].w));
                    }
                }
            }
            load(u, step + (u + UNROLL) * WARPS);
        }
    }
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        #pragma unroll
        for (int m = 0; m < TILES; m++) {
            float* to = sums[warp][r][m] + lane / 4 * 16 + lane % 4 * 4;
            const float(&z)[2][4] = c[r][m];
            *reinterpret_cast<float4*>(to) = make_float4(z[0][0], z[0][1], z[1][0], z[1][1]);
            *reinterpret_cast<float4*>(to + 128) = make_float4(z[0][2], z[0][3], z[1][2], z[1][3]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * 16 * TILES * 16; i += 32 * WARPS) {
        const int row = i % (ROWS * 16), token = i / (ROWS * 16), out = blockIdx.x * ROWS * 16 + row;
        if (first + token >= p.tokens || out >= p.outputs) continue;
        float z = p.bias[out];
        #pragma unroll
        for (int k = 0; k < WARPS; k++) z += sums[k][row / 16][token / 16][token % 16 * 16 + row % 16];
        p.y[i64(first + token) * p.outputs + out] = rounded(activate(z));
    }
}
