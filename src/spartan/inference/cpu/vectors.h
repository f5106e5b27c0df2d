// Vectors of floats in the compilers' own vector types, and the activations on them. No library code in here: an inline
// function of the standard library, compiled for AVX-512 in one object, could be the copy the linker keeps for all of them.
#ifndef SPARTAN_VECTORS_H
#define SPARTAN_VECTORS_H
#include "job.h"

#if defined(__AVX512F__)
#define VL 16
#else
#define VL 8  // without AVX2 the compiler splits it
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

typedef float vf __attribute__((vector_size(VL * 4)));
typedef float vfu __attribute__((vector_size(VL * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef uint16_t vhu __attribute__((vector_size(VL * 2), aligned(2)));
typedef uint32_t vw __attribute__((vector_size(VL * 4)));
typedef uint16_t h8u __attribute__((vector_size(16), aligned(2)));
typedef uint32_t w8 __attribute__((vector_size(32)));
typedef float v8 __attribute__((vector_size(32)));
typedef float v8u __attribute__((vector_size(32), aligned(4)));

INLINE vf load(const float* p) { return *(const vfu*)p; }
INLINE void store(float* p, vf v) { *(vfu*)p = v; }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

INLINE float from_bf16(uint16_t h) {
  union { uint32_t i; float f; } u = {(uint32_t)h << 16};
  return u.f;
}
INLINE vf load_bf16(const uint16_t* p) { return (vf)(__builtin_convertvector((vh)*(const vhu*)p, vw) << 16); }
INLINE uint16_t to_bf16(float f) {  // round to nearest even; NaN stays NaN
  union { float f; uint32_t i; } u = {f};
  return f != f ? 0x7fc0 : (uint16_t)((u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16);
}
INLINE void store_bf16(uint16_t* p, vf v) {
  vw i = (vw)v;
  vw rounded = (i + 0x7fff + ((i >> 16) & 1)) >> 16;
  vw nan = (vw)(v != v);
  *(vhu*)p = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), vh);
}

// e^x by 2^n · p(r), |r| ≤ ln2/2, cut off at −87 and 88; NaN passes through. The tests bound the activations' error.
INLINE vf exp_(vf x) {
  vf cut = pick(x > 88.0f, vf{} + 88.0f, x);
  cut = pick(cut < -87.0f, vf{} - 87.0f, cut);
  vf n = (cut * 1.44269504f + 12582912.0f) - 12582912.0f;
  vf r = cut - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666657f + r * (0.0416657962f + r * (8.3334519e-3f + r * 1.3981999e-3f)))));
  return p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}
INLINE vf relu(vf x) { return pick(x < 0.0f, vf{}, x); }  // in this order NaN stays NaN, as in torch
INLINE vf silu(vf x) { return x / (1.0f + exp_(-x)); }
INLINE vf gelu_tanh(vf x) { return x / (1.0f + exp_(-1.5957691216f * (x + 0.044715f * x * x * x))); }
// x·Φ(x), erf by Abramowitz & Stegun 7.1.26 (absolute error 1.5e-7).
INLINE vf gelu(vf x) {
  vf z = x * 0.70710678f;
  vf a = pick(z < 0.0f, -z, z);
  vf t = 1.0f / (1.0f + 0.3275911f * a);
  vf tail = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t * exp_(-a * a);
  return 0.5f * x * pick(z < 0.0f, tail, 2.0f - tail);  // 1 + erf(z), without the cancellation at z < 0
}
INLINE vf activate(vf x, int64_t kind) {
  switch (kind) {
    case RELU: return relu(x);
    case GELU: return gelu(x);
    case GELU_TANH: return gelu_tanh(x);
    case SILU: return silu(x);
    default: return x;
  }
}

// The activation over n floats in place. A short rest goes through a vector of its own, so every entry is rounded alike.
static void activate_run(float* p, int64_t n, int64_t kind) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) store(p + i, activate(load(p + i), kind));
  if (i < n) {
    float rest[VL] = {};
    for (int64_t j = i; j < n; j++) rest[j - i] = p[j];
    store(rest, activate(load(rest), kind));
    for (int64_t j = i; j < n; j++) p[j] = rest[j - i];
  }
}
INLINE void copy_run(float* to, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) store(to + i, load(from + i));
  for (; i < n; i++) to[i] = from[i];
}
INLINE void widen_run(float* to, const uint16_t* from, int64_t n) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) store(to + i, load_bf16(from + i));
  for (; i < n; i++) to[i] = from_bf16(from[i]);
}
INLINE void narrow_run(uint16_t* to, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) store_bf16(to + i, load(from + i));
  for (; i < n; i++) to[i] = to_bf16(from[i]);
}
// n numbers of either type into floats.
INLINE void read_run(float* to, const void* from, int64_t at, int64_t n, int64_t bf16) {
  if (bf16) widen_run(to, (const uint16_t*)from + at, n);
  else copy_run(to, (const float*)from + at, n);
}
INLINE void write_run(void* to, int64_t at, const float* from, int64_t n, int64_t bf16) {
  if (bf16) narrow_run((uint16_t*)to + at, from, n);
  else copy_run((float*)to + at, from, n);
}

// Every second of 2n − 1 floats.
INLINE void copy_evens(float* to, const float* from, int64_t n) {
  int64_t j = 0;
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  for (; j + VL < n; j += VL) {
    const vf a = load(from + 2 * j), b = load(from + 2 * j + VL);
#if VL == 16
    store(to + j, __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
#else
    store(to + j, __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14));
#endif
  }
#endif
  for (; j < n; j++) to[j] = from[2 * j];
}

// 8×8 floats across the diagonal: rows of `from` become columns of `to`.
INLINE void transpose8(float* to, int64_t to_pitch, const float* from, int64_t from_pitch) {
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  v8 a[8], b[8];
  UNROLL for (int i = 0; i < 8; i++) a[i] = *(const v8u*)(from + i * from_pitch);
  UNROLL for (int i = 0; i < 4; i++) {
    b[2 * i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    b[2 * i + 1] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    a[4 * i] = __builtin_shufflevector(b[4 * i], b[4 * i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    a[4 * i + 1] = __builtin_shufflevector(b[4 * i], b[4 * i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    a[4 * i + 2] = __builtin_shufflevector(b[4 * i + 1], b[4 * i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    a[4 * i + 3] = __builtin_shufflevector(b[4 * i + 1], b[4 * i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    *(v8u*)(to + i * to_pitch) = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    *(v8u*)(to + (i + 4) * to_pitch) = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
#else
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++) to[j * to_pitch + i] = from[i * from_pitch + j];
#endif
}
// rows × columns of `from`, transposed into `to`.
static void transpose(float* to, int64_t to_pitch, const float* from, int64_t from_pitch, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i += 8)
    for (int64_t j = 0; j < columns; j += 8) {
      if (i + 8 <= rows && j + 8 <= columns) {
        transpose8(to + j * to_pitch + i, to_pitch, from + i * from_pitch + j, from_pitch);
        continue;
      }
      for (int64_t a = i; a < rows && a < i + 8; a++)
        for (int64_t b = j; b < columns && b < j + 8; b++) to[b * to_pitch + a] = from[a * from_pitch + b];
    }
}
#endif
