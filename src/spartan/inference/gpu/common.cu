// What the kernels share. They are compiled at run time, this file before each, with constants given as macros: HALF (0:
// bfloat16, 1: float16), ACT (place in ACTIVATIONS), ALIGNED (rows of x begin at 16 bytes and have a multiple of 16 columns),
// and those that a kernel names.
//
// With few tokens a kernel lasts a few microseconds, of which starting, and waiting for the first bytes, would take most. So
// everything that does not depend on the tokens is asked for before `wait_for_previous`: with programmatic dependent launch
// (sm_90) that happens while the kernel before is still running.

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

// One product of the tensor cores: 16×16 by 16×8.
INLINE void multiply(float (&c)[4], const uint4& a, const uint2& b) {
#if HALF
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
