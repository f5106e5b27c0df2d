// The functions of src/spartan/inference/gpu/ptx.cu, and what CUDA C++ has besides, for a CPU: a thread for every thread of a
// cluster, one cluster after the other. Slow, and enough to run the kernels on small layers. bfloat16 only.

#include <barrier>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

using std::min;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define INLINE inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static  // one cluster at a time, and a kernel with clusters uses SHARED_MEMORY alone
#define SHARED_MEMORY(name) char* name = emulated.memory
#define __expf expf
#define __syncthreads() emulated.block->arrive_and_wait()
#define __syncwarp() emulated.warp->meeting.arrive_and_wait()

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct dim3 { int x, y, z; };
INLINE uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
INLINE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
INLINE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// What the lanes of a warp show each other.
struct Warp {
    std::barrier<> meeting{32};
    uint4 a[32], b[32];
    u32 at[32];
};

struct Emulated {
    char* memory;
    std::vector<char*>* all;
    std::barrier<>*block, *cluster;
    Warp* warp;
};

static thread_local Emulated emulated;
static thread_local dim3 threadIdx, blockIdx, gridDim;

INLINE float as_float(u32 u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

INLINE float low(u32 w) { return as_float(w << 16); }
INLINE float high(u32 w) { return as_float(w & 0xffff0000u); }
INLINE float half_of(u32 w, int k) { return k % 2 ? high(w) : low(w); }

INLINE u16 rounded(float f) {
    u32 u;
    memcpy(&u, &f, 4);
    return f != f ? 0x7fc0 : u16((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

INLINE u32 __byte_perm(u32 a, u32 b, u32 which) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    u32 v = 0;
    for (int i = 0; i < 4; i++) v |= u32(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return v;
}

INLINE u32 __funnelshift_r(u32 low, u32 high, int by) { return u32(((unsigned long long)high << 32 | low) >> by); }

INLINE void let_next_begin() {}
INLINE void wait_for_previous() {}
INLINE void wait_for_copies() {}
INLINE uint4 load16(const uint4* p) { return *p; }
INLINE uint2 load8(const uint2* p) { return *p; }
INLINE u32 load4(const u32* p) { return *p; }
INLINE void copy16(void* to, const void* from) { memcpy(to, from, 16); }
INLINE u32 shared_address(const void* p) { return u32((const char*)p - emulated.memory); }

INLINE float from_shared(u32 at) {
    float f;
    memcpy(&f, emulated.memory + at, 4);
    return f;
}

INLINE void meet() { emulated.cluster->arrive_and_wait(); }
INLINE float of_other(const float* at, int rank) { return *(const float*)((*emulated.all)[rank] + shared_address(at)); }

INLINE uint4 some_matrices(u32 at, bool turned) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (at % 16) abort();
    emulated.warp->at[lane] = at;
    emulated.warp->meeting.arrive_and_wait();
    u32 v[4] = {};
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 2; i++) {
            const int row = turned ? 2 * t + i : g, column = turned ? g : 2 * t + i;
            u16 h;
            memcpy(&h, emulated.memory + emulated.warp->at[8 * j + row] + 2 * column, 2);
            v[j] |= u32(h) << 16 * i;
        }
    emulated.warp->meeting.arrive_and_wait();
    return {v[0], v[1], v[2], v[3]};
}

INLINE uint4 matrices(u32 at) { return some_matrices(at, false); }
INLINE uint4 turned_matrices(u32 at) { return some_matrices(at, true); }

INLINE void multiply(float (&c)[4], const uint4& a, const uint2& b) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Warp& warp = *emulated.warp;
    warp.a[lane] = a;
    warp.b[lane] = {b.x, b.y, 0, 0};
    warp.meeting.arrive_and_wait();
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) {
            const uint4& from = warp.a[g * 4 + k % 8 / 2];
            const uint4& by = warp.b[(2 * t + i % 2) * 4 + k % 8 / 2];
            const u32 left = k < 8 ? (i < 2 ? from.x : from.y) : (i < 2 ? from.z : from.w);
            c[i] += half_of(left, k) * half_of(k < 8 ? by.x : by.y, k);
        }
    warp.meeting.arrive_and_wait();
}

INLINE void multiply_sparse(float (&c)[4], u32 upper, u32 lower, const uint4& b, u32 positions) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Warp& warp = *emulated.warp;
    warp.a[lane] = {upper, lower, positions, 0};
    warp.b[lane] = b;
    warp.meeting.arrive_and_wait();
    for (int i = 0; i < 4; i++)
        for (int stored = 0; stored < 16; stored++) {
            const uint4& from = warp.a[g * 4 + stored % 8 / 2];
            if ((stored < 8) != (i < 2)) continue;  // the quarters that are zero
            // Four bits of positions for two stored numbers of four; all lanes of a row give the same for every four.
            const u32 place = from.z >> 4 * (stored / 2 % 8) + 2 * (stored % 2) & 3;
            const int k = stored / 2 * 4 + place;
            const uint4& by = warp.b[(2 * t + i % 2) * 4 + k % 8 / 2];
            const u32 word = k < 8 ? by.x : k < 16 ? by.y : k < 24 ? by.z : by.w;
            c[i] += half_of(i < 2 ? from.x : from.y, stored) * half_of(word, k);
        }
    warp.meeting.arrive_and_wait();
}

// Runs a kernel on a grid of blocks.
template <class Arguments>
void emulate(void (*kernel)(Arguments), const void* packed, int x, int y, int threads, int shared, int cluster) {
    Arguments arguments;
    memcpy(&arguments, packed, sizeof arguments);
    for (int by = 0; by < y; by++)
        for (int first = 0; first < x; first += cluster) {
            std::vector<std::vector<char>> memory(cluster, std::vector<char>(shared + 128, 0x55));
            std::vector<char*> all;
            for (auto& each : memory) all.push_back((char*)(((size_t)each.data() + 127) & ~(size_t)127));
            std::barrier<> together(cluster * threads);
            std::vector<std::unique_ptr<std::barrier<>>> blocks;
            std::vector<std::unique_ptr<Warp>> warps;
            for (int c = 0; c < cluster; c++) blocks.push_back(std::make_unique<std::barrier<>>(threads));
            for (int w = 0; w < cluster * threads / 32; w++) warps.push_back(std::make_unique<Warp>());
            std::vector<std::thread> running;
            for (int i = 0; i < cluster * threads; i++)
                running.emplace_back([&, i] {
                    const int c = i / threads;
                    threadIdx = {i % threads, 0, 0}, blockIdx = {first + c, by, 0}, gridDim = {x, y, 1};
                    emulated = {all[c], &all, blocks[c].get(), &together, warps[i / 32].get()};
                    kernel(arguments);
                });
            for (auto& thread : running) thread.join();
        }
}
