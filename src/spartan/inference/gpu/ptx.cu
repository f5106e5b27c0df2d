// Everything that only a CUDA device can do, in small functions. The tests have the same ones for a CPU
// (tests/inference/cuda_on_cpu.h), so that the kernels, which use nothing else, run there too.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define INLINE __device__ __forceinline__
#define SHARED_MEMORY(name) extern __shared__ __align__(128) char name[]

// Lets the next kernel's blocks begin; lets this one's wait for all that the kernel before has written.
INLINE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

INLINE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// For what is read once: past the L1 cache.
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

INLINE u32 load4(const u32* p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// 16 bytes to shared memory, on their way until `wait_for_copies`.
INLINE void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(u32(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}

INLINE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

INLINE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

INLINE float from_shared(u32 at) {
    float f;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(f) : "r"(at));
    return f;
}

// Four matrices of 8×8, lane 8j + i giving the address of row i of matrix j; of each, lane 4g + t gets row g, columns 2t and
// 2t + 1, or the same of the matrix turned.
INLINE uint4 matrices(u32 at) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

INLINE uint4 turned_matrices(u32 at) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

#if HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

// One product of the tensor cores: 16×16 by 16×8.
INLINE void multiply(float (&c)[4], const uint4& a, const uint2& b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// One of the sparse ones: 16×32, of which two of four are stored, by 32×8. Of the stored 16×16 only the upper left and the
// lower right quarter are not zero.
INLINE void multiply_sparse(float (&c)[4], u32 upper, u32 lower, const uint4& b, u32 positions) {
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %5, %6}, {%7, %8, %9, %10}, {%0, %1, %2, %3}, %11, 0x0;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(upper), "r"(0), "r"(lower), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(positions));
}

// A meeting of all threads of a cluster; and a number in the shared memory of another of its blocks.
INLINE void meet() { asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory"); }

INLINE float of_other(const float* at, int rank) {
    u32 there;
    float f;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(f) : "r"(there) : "memory");
    return f;
}

// The two numbers of a word in float32; and a number in 16 bits.
#if HALF
INLINE float low(u32 w) {
    float f;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(f) : "r"(w));
    return f;
}

INLINE float high(u32 w) { return low(w >> 16); }
#else
INLINE float low(u32 w) { return __uint_as_float(w << 16); }

INLINE float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
#endif

INLINE u16 rounded(float f) {
    u16 h;
    asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
