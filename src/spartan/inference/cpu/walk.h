// walk: the product for one token or a few, where the time is that of reading the weights. For single weights.
//
// 16 rows go through their columns side by side. A *slot* holds the next weight of each: 16 values, 16 bytes that say where
// in a window of 128 inputs each one's input lies, and one number for the window, which begins at a multiple of 16 inputs.
// A row with no weight left in the window has the value 0 there: at a place that it uses anyway, or, where it uses none,
// with the top bit of the place set, and then it is not multiplied. So a NaN reaches only the outputs that use it.
// AVX-512 holds the window in registers and looks inputs up there; AVX2 gathers them. From some tokens on, the lanes hold
// these instead, and weights are broadcast. See `walk.py` for the packing.
#ifndef SPARTAN_WALK_H
#define SPARTAN_WALK_H
#include "vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int ROWS = 16, PARTS = ROWS / VL, STRIDE = 16;
constexpr int FEW = 3;        // up to so many tokens are looked up one by one
constexpr int AHEAD = 64;     // slots between what is multiplied and what is asked of the memory
typedef uint64_t bytes8 __attribute__((aligned(1), may_alias));
constexpr uint64_t ABSENT = 0x8080808080808080ull;
#if VL == 16
constexpr int MOST = 16;      // tokens of one pass
#else
constexpr int MOST = 8;
#endif

INLINE int64_t walk_width(int64_t tokens) { return tokens <= FEW ? 1 : tokens <= 8 ? 8 : 16; }

// Weights of part p of a slot, as floats.
template <bool HALF> INLINE vf slot_weights(const void* values, int64_t slot, int p) {
  if (HALF) return load_bf16((const uint16_t*)values + slot * ROWS + p * VL);
  return load((const float*)values + slot * ROWS + p * VL);
}

// sum += w · x[places]
INLINE vf look_up(const float* x, const uint8_t* places, vf w, vf sum) {
#if VL == 16
  const __m128i at = _mm_loadu_si128((const __m128i*)places);
  const __m512i i = _mm512_cvtepu8_epi32(at);  // of which the lookups read the lowest five bits
  const __m512 a = _mm512_permutex2var_ps(_mm512_load_ps(x), i, _mm512_load_ps(x + 16));
  const __m512 b = _mm512_permutex2var_ps(_mm512_load_ps(x + 32), i, _mm512_load_ps(x + 48));
  const __m512 c = _mm512_permutex2var_ps(_mm512_load_ps(x + 64), i, _mm512_load_ps(x + 80));
  const __m512 d = _mm512_permutex2var_ps(_mm512_load_ps(x + 96), i, _mm512_load_ps(x + 112));
  const __mmask16 fifth = _mm_movepi8_mask(_mm_slli_epi16(at, 2)), sixth = _mm_movepi8_mask(_mm_slli_epi16(at, 1));
  const __m512 low = _mm512_mask_blend_ps(fifth, a, b), high = _mm512_mask_blend_ps(fifth, c, d);
  const __mmask16 there = (__mmask16)~_mm_movepi8_mask(at);
  return (vf)_mm512_mask3_fmadd_ps(_mm512_mask_blend_ps(sixth, low, high), (__m512)w, (__m512)sum, there);
#elif defined(__AVX2__)
  const __m256i i = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)places));
  const __m256 absent = _mm256_castsi256_ps(_mm256_srai_epi32(_mm256_slli_epi32(i, 24), 31));
  return sum + w * (vf)_mm256_andnot_ps(absent, _mm256_i32gather_ps(x, i, 4));
#else
  vf xs;
  UNROLL for (int k = 0; k < VL; k++) xs[k] = places[k] & 0x80 ? 0.0f : x[places[k]];
  return sum + w * xs;
#endif
}

// Vectors from and to any address. By type, since a template's argument loses the alignment that `v8u` and `vfu` state.
INLINE void read_any(v8& v, const float* p) { v = *(const v8u*)p; }
INLINE void write_any(float* p, const v8& v) { *(v8u*)p = v; }
#if VL == 16
INLINE void read_any(vf& v, const float* p) { v = *(const vfu*)p; }
INLINE void write_any(float* p, const vf& v) { *(vfu*)p = v; }
#endif

INLINE void ask_ahead(const Job* job, int64_t s) {
  __builtin_prefetch((const char*)job->values + (s + AHEAD) * ROWS * (job->half ? 2 : 4));
  __builtin_prefetch(job->places + (s + AHEAD) * ROWS);
}

// T tokens, x as [token][pitch]; sums as [token][ROWS].
template <int T, bool HALF> void walk_few(const Job* job, int64_t first, int64_t last, const float* x, float* out) {
  vf sums[T][PARTS] = {};
  for (int64_t s = first; s < last; s++) {
    ask_ahead(job, s);
    const float* window = x + (int64_t)job->windows[s] * STRIDE;
    UNROLL for (int p = 0; p < PARTS; p++) {
      const vf w = slot_weights<HALF>(job->values, s, p);
      UNROLL for (int t = 0; t < T; t++)
        sums[t][p] = look_up(window + t * job->pitch, job->places + s * ROWS + p * VL, w, sums[t][p]);
    }
  }
  UNROLL for (int t = 0; t < T; t++) {
    UNROLL for (int p = 0; p < PARTS; p++) store(out + t * ROWS + p * VL, sums[t][p]);
  }
}

// A vector of tokens, x as [input][vector]; sums of LANES rows from row `lane` on, as [row][vector].
template <class V, int LANES, bool HALF>
void walk_many(const Job* job, int64_t first, int64_t last, int lane, const float* x, float* out) {
  constexpr int W = sizeof(V) / 4;
  V sums[LANES] = {}, x_k;
  float wide[ROWS];
  for (int64_t s = first; s < last; s++) {
    ask_ahead(job, s);
    const float* window = x + (int64_t)job->windows[s] * (STRIDE * W);
    const uint8_t* at = job->places + s * ROWS + lane;
    const float* w = (const float*)job->values + s * ROWS + lane;
    if (HALF) {
      UNROLL for (int p = 0; p < PARTS; p++) store(wide + p * VL, slot_weights<true>(job->values, s, p));
      w = wide + lane;
    }
    uint64_t absent = 0;
    UNROLL for (int k = 0; k < LANES; k += 8) absent |= *(const bytes8*)(at + k);
    if (__builtin_expect(absent & ABSENT, 0)) {
      UNROLL for (int k = 0; k < LANES; k++) {
        if (at[k] & 0x80) continue;
        read_any(x_k, window + at[k] * W);
        sums[k] += w[k] * x_k;
      }
    } else {
      UNROLL for (int k = 0; k < LANES; k++) {
        read_any(x_k, window + at[k] * W);
        sums[k] += w[k] * x_k;
      }
    }
  }
  UNROLL for (int k = 0; k < LANES; k++) write_any(out + k * W, sums[k]);
}

template <bool HALF> void walk_group(const Job* job, int64_t first, int64_t last, int64_t width, const float* x, float* out) {
#if VL == 16
  if (width == 16) return walk_many<vf, 16, HALF>(job, first, last, 0, x, out);
  if (width == 8) return walk_many<v8, 16, HALF>(job, first, last, 0, x, out);
#else
  if (width == 8) {  // the sums of eight rows fill half of the registers
    walk_many<v8, 8, HALF>(job, first, last, 0, x, out);
    return walk_many<v8, 8, HALF>(job, first, last, 8, x, out + 8 * 8);
  }
#endif
  if (job->tokens == 1) return walk_few<1, HALF>(job, first, last, x, out);
  if (job->tokens == 2) return walk_few<2, HALF>(job, first, last, x, out);
  return walk_few<3, HALF>(job, first, last, x, out);
}

int64_t walk_most() { return MOST; }

// A run of `chunk` inputs of all tokens into [token][pitch] or [input][width]; zeros beyond the last token.
void walk_pack(Job* job, int64_t task, int64_t) {
  const int64_t k0 = task * 512, n = job->inputs - k0 < 512 ? job->inputs - k0 : 512, width = walk_width(job->tokens);
  if (width == 1) {
    for (int64_t t = 0; t < job->tokens; t++)
      read_run(job->pack + t * job->pitch + k0, job->x, t * job->inputs + k0, n, job->bf16);
    return;
  }
  float block[MOST * 512];
  for (int64_t t = 0; t < width; t++) {
    if (t < job->tokens) read_run(block + t * 512, job->x, t * job->inputs + k0, n, job->bf16);
    else for (int64_t j = 0; j < n; j++) block[t * 512 + j] = 0.0f;
  }
  transpose(job->pack + k0 * width, width, block, 512, width, n);
}

void walk_multiply(Job* job, int64_t task, int64_t) {
  const int64_t first = task * job->chunk, end = first + job->chunk, last = end < job->groups ? end : job->groups;
  const int64_t width = walk_width(job->tokens), n = job->outputs;
  float sums[MOST * ROWS], turned[MOST * ROWS];
  for (int64_t r = first; r < last; r++) {
    const int64_t a = job->starts[r], b = job->starts[r + 1];
    if (job->half) walk_group<true>(job, a, b, width, job->pack, sums);
    else walk_group<false>(job, a, b, width, job->pack, sums);
    if (width > 1) transpose(turned, ROWS, sums, width, ROWS, width);
    float* rows = width > 1 ? turned : sums;
    for (int64_t t = 0; t < job->tokens; t++) {
      float* row = rows + t * ROWS;
      UNROLL for (int p = 0; p < PARTS; p++) store(row + p * VL, load(row + p * VL) + load(job->bias + r * ROWS + p * VL));
      if (job->activation != NONE) activate_run(row, ROWS, job->activation);
      for (int64_t k = 0; k < ROWS; k++) {
        const int64_t to = job->index[r * ROWS + k];
        if (to < n) write_run(job->y, t * n + to, row + k, 1, job->bf16);
      }
    }
  }
}

}  // namespace
#endif
