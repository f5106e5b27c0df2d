// Multiplies one token by single weights, reading only those that are kept.
//
// A block of threads holds the token in shared memory and takes GROUPS groups of 32 rows, a lane to a row; a warp takes one
// of SHARES shares of a group. A row's weights come eight at a time: 16 bytes of values, and 8 of gaps, from one weight's
// input to the next one's. AHEAD chunks of eight are on their way at a time. Several tokens are taken one by one.

constexpr int R = GROUPS * 32, THREADS = R * SHARES;

struct SingleArguments {
    const u16* x;
    const uint4* values;
    const uint2* gaps;
    const u16* bases;
    const int* starts;
    const int* rows;
    const float* bias;
    u16* y;
    i64 stride;
    int tokens, inputs, outputs, unused;
};

INLINE void hold(const u16* from, float* held, int columns) {
#if ALIGNED
    for (int i = threadIdx.x * 8; i < columns; i += THREADS * 8) {
        const uint4 v = *reinterpret_cast<const uint4*>(from + i);
        float4* to = reinterpret_cast<float4*>(held + i);
        to[0] = make_float4(low(v.x), high(v.x), low(v.y), high(v.y));
        to[1] = make_float4(low(v.z), high(v.z), low(v.w), high(v.w));
    }
#else
    for (int i = threadIdx.x; i < columns; i += THREADS) held[i] = low(from[i]);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) single_linear(const SingleArguments p) {
    SHARED_MEMORY(memory);
    float* sums = reinterpret_cast<float*>(memory);  // [SHARES, R]
    float* held = sums + SHARES * R;                 // the token, and a zero
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / SHARES, share = warp % SHARES;
    const int run = (blockIdx.x * GROUPS + group) * SHARES + share;
    int chunk = p.starts[run];
    const int end = p.starts[run + 1];
    let_next_begin();
    const uint4* values = p.values + lane;
    const uint2* gaps = p.gaps + lane;
    uint4 v[AHEAD];
    uint2 d[AHEAD];
    const auto load = [&](int a, int at) {
        if (at >= end) return;
        v[a] = load16(values + i64(at) * 32);
        d[a] = load8(gaps + i64(at) * 32);
    };
    #pragma unroll
    for (int a = 0; a < AHEAD; a++) load(a, chunk + a);
    const u32 begin = shared_address(held), zero = begin + p.inputs * 4;
    u32 at = begin + p.bases[i64(run) * 32 + lane] * 4;
    wait_for_previous();
    if (threadIdx.x == 0) held[p.inputs] = 0.f;
    hold(p.x + blockIdx.y * p.stride, held, p.inputs);
    __syncthreads();
    float z = 0.f;
    while (chunk < end) {
        #pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (chunk + a >= end) break;
            const u32 words[4] = {v[a].x, v[a].y, v[a].z, v[a].w}, gap[2] = {d[a].x, d[a].y};
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                at += __byte_perm(gap[i / 4], 0, 0x4440 + i % 4) * 4;
                const float w = i % 2 ? high(words[i / 2]) : low(words[i / 2]);
                // What only fills a row up takes the zero: a NaN reaches no output that has no use for it.
                z += w * from_shared(w != 0.f ? at : zero);
            }
            load(a, chunk + a + AHEAD);
        }
        chunk += AHEAD;
    }
    sums[share * R + group * 32 + lane] = z;
    __syncthreads();
    for (int i = threadIdx.x; i < R; i += THREADS) {
        const int out = p.rows[blockIdx.x * R + i];
        if (out >= p.outputs) continue;
        float total = p.bias[out];
        #pragma unroll
        for (int s = 0; s < SHARES; s++) total += sums[s * R + i];
        p.y[i64(blockIdx.y) * p.outputs + out] = rounded(activate(total));
    }
}
