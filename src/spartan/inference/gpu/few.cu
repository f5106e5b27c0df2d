// Multiplies one to 64 tokens by a sparse weight, reading of the weight only what is kept (see few_cuda.py for the formats).
//
// Compiled at run time, with constants given as macros: HALF (0: bfloat16, 1: float16), ACT (place in ACTIVATIONS), ALIGNED
// (rows of x begin at 16 bytes and have a multiple of 16 columns), and those that are named at each kernel.
//
// With so few tokens a kernel lasts a few microseconds, of which starting, and waiting for the first bytes, would take most.
// So everything that does not depend on the tokens is asked for before `wait_for_previous`: with programmatic dependent
// launch (sm_90) that happens while the kernel before is still running.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define INLINE __device__ __forceinline__

INLINE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

INLINE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Read once: past the L1 cache.
INLINE uint4 load16(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

INLINE uint2 load8(const uint2* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// The two numbers of a word in float32.
INLINE float low(u32 w) {
#if HALF
    float f;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(f) : "r"(w));
    return f;
#else
    return __uint_as_float(w << 16);
#endif
}

INLINE float high(u32 w) {
#if HALF
    float f;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(f) : "r"(w));
    return f;
#else
    return __uint_as_float(w & 0xffff0000u);
#endif
}

INLINE u16 rounded(float f) {
    u16 h;
#if HALF
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
#endif
    return h;
}

INLINE float activate(float z) {
#if ACT == 1
    return z < 0.f ? 0.f : z;
#elif ACT == 2
    return 0.5f * z * (1.f + erff(z * 0.70710678f));
#elif ACT == 3
    return z / (1.f + __expf(-1.5957691216057308f * (z + 0.044715f * z * z * z)));
#elif ACT == 4
    return z / (1.f + __expf(-z));
#else
    return z;
#endif
}

// ------------------------------------------------------------------------------------------------------------------ blocks
//
// A block of threads takes one strip of 16·ROWS outputs and NT·8 tokens; its WARPS take the strip's steps in turn. A step is
// 16 inputs: ROWS fragments of tensor-core operands, each 16 bytes a lane, in the order in which the lanes hold them. Inputs
// 4t … 4t+3 belong to lane t of four, which reads them from x in one load. UNROLL steps are on their way at a time.

#ifdef NT
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

INLINE void multiply(float (&c)[4], const uint4& a, const uint2& b) {
#if HALF
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

INLINE uint2 four_inputs(const BlockArguments& p, int token, int column) {
    uint2 b = make_uint2(0, 0);
    if (token >= p.tokens) return b;
    const u16* from = p.x + token * p.stride + column;
#if ALIGNED
    b = *reinterpret_cast<const uint2*>(from);
#else
    u32 v[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) v[i] = column + i < p.inputs ? from[i] : 0;
    b.x = v[0] | v[1] << 16;
    b.y = v[2] | v[3] << 16;
#endif
    return b;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) block_linear(const BlockArguments p) {
    __shared__ float sums[WARPS][ROWS][NT][128];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.y * NT * 8;
    const int end = p.starts[blockIdx.x + 1];
    int step = p.starts[blockIdx.x] + warp;
    let_next_begin();
    uint4 a[UNROLL][ROWS];
    int column[UNROLL];
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const int i = step + u * WARPS;
        if (i < end) {
            #pragma unroll
            for (int r = 0; r < ROWS; r++) a[u][r] = load16(p.weight + (i64(i) * ROWS + r) * 32 + lane);
            column[u] = p.columns[i];
        }
    }
    float c[ROWS][NT][4] = {};
    wait_for_previous();
    while (step < end) {
        uint2 b[UNROLL][NT];
        #pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (step + u * WARPS < end) {
                #pragma unroll
                for (int n = 0; n < NT; n++)
                    b[u][n] = four_inputs(p, first + n * 8 + lane / 4, column[u] * 16 + lane % 4 * 4);
            }
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int next = step + (u + UNROLL) * WARPS;
            if (step + u * WARPS < end) {
                #pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    #pragma unroll
                    for (int n = 0; n < NT; n++) multiply(c[r][n], a[u][r], b[u][n]);
                }
            }
            if (next < end) {
                #pragma unroll
                for (int r = 0; r < ROWS; r++) a[u][r] = load16(p.weight + (i64(next) * ROWS + r) * 32 + lane);
                column[u] = p.columns[next];
            }
        }
        step += UNROLL * WARPS;
    }
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        #pragma unroll
        for (int n = 0; n < NT; n++) {
            float* to = sums[warp][r][n] + lane / 4 * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(to) = make_float2(c[r][n][0], c[r][n][1]);
            *reinterpret_cast<float2*>(to + 64) = make_float2(c[r][n][2], c[r][n][3]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * 16 * NT * 8; i += 32 * WARPS) {
        const int row = i % (ROWS * 16), token = i / (ROWS * 16), out = blockIdx.x * ROWS * 16 + row;
        if (first + token >= p.tokens || out >= p.outputs) continue;
        float z = p.bias[out];
        #pragma unroll
        for (int w = 0; w < WARPS; w++) z += sums[w][row / 16][token / 8][row % 16 * 8 + token % 8];
        p.y[i64(first + token) * p.outputs + out] = rounded(activate(z));
    }
}
#endif

// ---------------------------------------------------------------------------------------------------------- single weights
//
// A block of threads takes GROUPS groups of rows, a window of WINDOW inputs and TOKENS tokens, which it holds in shared
// memory, one input's tokens together. A warp takes one of SHARES shares of a group: LANES lanes a row, of TOKENS / LANES
// tokens each. A row's weights come eight at a time: 16 bytes of values, and 8 of steps from one input to the next. CLASSES
// counts separate walks, over the inputs of one remainder: with 16 tokens and four walks no two rows read the same bank.
// The WINDOWS windows are a cluster, whose sums are added up in its order.

#ifdef TOKENS
constexpr int LANE_TOKENS = TOKENS / LANES, G = 32 / LANES, R = GROUPS * G, THREADS = 32 * GROUPS * SHARES;

struct SingleArguments {
    const u16* x;
    const uint4* values;
    const uint2* gaps;
    const u16* bases;
    const int* starts;
    const u8* places;
    const int* rows;
    const float* bias;
    u16* y;
    i64 stride;
    int tokens, inputs, outputs, unused;
};

#if TOKENS == 1
typedef float Held;
#else
typedef u16 Held;
#endif

INLINE u32 two_inputs(const u16* from, int column, int columns) {
#if ALIGNED
    return column < columns ? *reinterpret_cast<const u32*>(from + column) : 0;
#else
    const u32 a = column < columns ? from[column] : 0, b = column + 1 < columns ? from[column + 1] : 0;
    return a | b << 16;
#endif
}

// The window's inputs of TOKENS tokens, as columns.
INLINE void hold(const SingleArguments& p, Held* held, int first, int begin, int columns) {
#if TOKENS == 1
    const u16* from = p.x + first * p.stride + begin;
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
#else
    const u16* from = p.x + first * p.stride + begin;
    constexpr int HALVES = (TOKENS + 7) / 8, EACH = TOKENS / HALVES;
    const int there = p.tokens - first;
    for (int i = threadIdx.x; i * 2 < columns; i += THREADS) {
        #pragma unroll
        for (int h = 0; h < HALVES; h++) {
            // Neighbours begin with different halves, and with different ones of the two inputs: they write to different banks.
            const int t0 = HALVES == 1 ? 0 : (h ^ threadIdx.x / 2 % 2) * EACH;
            u32 v[EACH], turned[EACH];  // of two inputs; the first one's tokens, then the second's
            #pragma unroll
            for (int t = 0; t < EACH; t++) v[t] = t0 + t < there ? two_inputs(from + (t0 + t) * p.stride, i * 2, columns) : 0;
            #pragma unroll
            for (int t = 0; t < EACH / 2; t++) {
                turned[t] = __byte_perm(v[2 * t], v[2 * t + 1], 0x5410);
                turned[EACH / 2 + t] = __byte_perm(v[2 * t], v[2 * t + 1], 0x7632);
            }
            u32* to = reinterpret_cast<u32*>(held + i * 2 * TOKENS + t0);
#if TOKENS == 4
            *reinterpret_cast<uint4*>(to) = make_uint4(turned[0], turned[1], turned[2], turned[3]);
#else
            const uint4 one = make_uint4(turned[0], turned[1], turned[2], turned[3]);
            const uint4 other = make_uint4(turned[4], turned[5], turned[6], turned[7]);
            const bool swap = threadIdx.x / 4 % 2;
            *reinterpret_cast<uint4*>(to + (swap ? TOKENS / 2 : 0)) = swap ? other : one;
            *reinterpret_cast<uint4*>(to + (swap ? 0 : TOKENS / 2)) = swap ? one : other;
#endif
        }
    }
#endif
}

// Adds one weight's products with the inputs at an address in shared memory.
INLINE void add_products(float (&sums)[LANE_TOKENS], u32 at, float w) {
#if TOKENS == 1
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
    sums[0] += w * x;
#else
    u32 v[LANE_TOKENS / 2];
#if TOKENS == 4
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(at));
#else
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
#endif
    #pragma unroll
    for (int i = 0; i < LANE_TOKENS / 2; i++) {
        sums[2 * i] += w * low(v[i]);
        sums[2 * i + 1] += w * high(v[i]);
    }
#endif
}

#if WINDOWS > 1
INLINE void meet() {
    asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}

INLINE float of_other(const float* at, int rank) {
    u32 here = u32(__cvta_generic_to_shared(at)), there;
    float f;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(f) : "r"(there) : "memory");
    return f;
}
#endif

INLINE void finish(const SingleArguments& p, int first, int strip, int row, int token, float z) {
    const int out = p.rows[strip * R + row];
    if (out >= p.outputs || first + token >= p.tokens) return;
    p.y[i64(first + token) * p.outputs + out] = rounded(activate(z + p.bias[out]));
}

extern "C" __global__ void __launch_bounds__(THREADS) single_linear(const SingleArguments p) {
    extern __shared__ __align__(16) char memory[];
    float* sums = reinterpret_cast<float*>(memory);  // [SHARES, TOKENS, R]
    Held* held = reinterpret_cast<Held*>(sums + SHARES * TOKENS * R);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / LANES, part = lane % LANES;
    const int window = blockIdx.x % WINDOWS, strip = blockIdx.x / WINDOWS, first = blockIdx.y * TOKENS;
    const int group = warp / SHARES, share = warp % SHARES;
    const int run = ((strip * WINDOWS + window) * GROUPS + group) * SHARES + share;
    int chunk = p.starts[run];
    const int end = p.starts[run + 1];
    let_next_begin();
    const uint4* values = p.values + row;
    const uint2* gaps = p.gaps + row;
    uint4 v[AHEAD];
    uint2 d[AHEAD];
    #pragma unroll
    for (int a = 0; a < AHEAD; a++)
        if (chunk + a < end) {
            v[a] = load16(values + i64(chunk + a) * G);
            d[a] = load8(gaps + i64(chunk + a) * G);
        }
    // Where each walk is, in bytes; one more step of it is so many bytes.
    constexpr int STEP = CLASSES * TOKENS * sizeof(Held);
    const u32 begin = u32(__cvta_generic_to_shared(held)) + part * 16, zeros = begin + WINDOW * TOKENS * sizeof(Held);
    u32 at[CLASSES];
    #pragma unroll
    for (int c = 0; c < CLASSES; c++)
        at[c] = begin + p.bases[(i64(run) * G + row) * CLASSES + c] * STEP + (row + c) % CLASSES * TOKENS * sizeof(Held);
    const int place = p.places[((strip * WINDOWS + window) * GROUPS + group) * G + row];
    wait_for_previous();
    if (threadIdx.x < TOKENS) held[WINDOW * TOKENS + threadIdx.x] = 0;
    hold(p, held, first, window * WINDOW, min(WINDOW, p.inputs - window * WINDOW));
    __syncthreads();
    float z[LANE_TOKENS] = {};
    while (chunk < end) {
        #pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (chunk + a >= end) break;
            const u32 words[4] = {v[a].x, v[a].y, v[a].z, v[a].w}, gap[2] = {d[a].x, d[a].y};
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                at[i % CLASSES] += __byte_perm(gap[i / 4], 0, 0x4440 + i % 4) * STEP;
                const float w = i % 2 ? high(words[i / 2]) : low(words[i / 2]);
                // What only fills a row up takes zeros: a NaN reaches no output that has no use for it.
                add_products(z, w != 0.f ? at[i % CLASSES] : zeros, w);
            }
            if (chunk + a + AHEAD < end) {
                v[a] = load16(values + i64(chunk + a + AHEAD) * G);
                d[a] = load8(gaps + i64(chunk + a + AHEAD) * G);
            }
        }
        chunk += AHEAD;
    }
    #pragma unroll
    for (int t = 0; t < LANE_TOKENS; t++) sums[(share * TOKENS + part * LANE_TOKENS + t) * R + place] = z[t];
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
#endif
