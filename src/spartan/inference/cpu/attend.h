// attend: softmax(q kᵀ / √width) v, head by head, for inference without masks.
//
// A task is a head of one image and a share of its queries. It turns the keys across the diagonal, so that a few queries'
// scores lie in the lanes of a vector, and copies the values, up to KEYS of both at a time; with more keys than that, what
// was summed is faded as a higher score turns up. Six queries go through at a time: their scores stay in the first-level
// cache, and so do the keys and values of a short sequence, for all queries, in the second.
#ifndef SPARTAN_ATTEND_H
#define SPARTAN_ATTEND_H
#include "vectors.h"

namespace {

constexpr int64_t KEYS = 512;
constexpr int SIX = 6;               // queries at a time
constexpr int STRIP = VL == 16 ? 4 : 2;  // vectors at a time: 24 or 12 sums stay in registers

// out[m][v] = Σ_j a[m][j] · b[j][v], or that much more
template <int M, int NV>
void small_product(const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, int64_t n, bool more, float* out, int64_t pitch) {
  vf sums[M][NV] = {};
  if (more) {
    UNROLL for (int m = 0; m < M; m++) {
      UNROLL for (int v = 0; v < NV; v++) sums[m][v] = load(out + m * pitch + v * VL);
    }
  }
  for (int64_t j = 0; j < n; j++, b += b_pitch) {
    vf bs[NV];
    UNROLL for (int v = 0; v < NV; v++) bs[v] = load(b + v * VL);
    UNROLL for (int m = 0; m < M; m++) {
      UNROLL for (int v = 0; v < NV; v++) sums[m][v] += a[m * a_pitch + j] * bs[v];
    }
  }
  UNROLL for (int m = 0; m < M; m++) {
    UNROLL for (int v = 0; v < NV; v++) store(out + m * pitch + v * VL, sums[m][v]);
  }
}

typedef void (*SmallProduct)(const float*, int64_t, const float*, int64_t, int64_t, bool, float*, int64_t);
template <int M> SmallProduct product_sized(int64_t vectors) {
  if constexpr (STRIP > 2) {
    if (vectors == 4) return small_product<M, 4>;
    if (vectors == 3) return small_product<M, 3>;
  }
  return vectors == 2 ? small_product<M, 2> : small_product<M, 1>;
}
SmallProduct product_of(int64_t m, int64_t vectors) {
  switch (m) {
    case 1: return product_sized<1>(vectors);
    case 2: return product_sized<2>(vectors);
    case 3: return product_sized<3>(vectors);
    case 4: return product_sized<4>(vectors);
    case 5: return product_sized<5>(vectors);
    default: return product_sized<SIX>(vectors);
  }
}

// The same for m rows and any number of vectors, in strips of nearly equal width.
void few_rows(int64_t m, const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, int64_t n, bool more, float* out,
              int64_t pitch, int64_t vectors) {
  const int64_t strips = (vectors + STRIP - 1) / STRIP;
  for (int64_t s = 0; s < strips; s++) {
    const int64_t from = s * vectors / strips, to = (s + 1) * vectors / strips;
    product_of(m, to - from)(a, a_pitch, b + from * VL, b_pitch, n, more, out + from * VL, pitch);
  }
}

// Scores of one query become e^(score − highest), whole vectors of them; returns their sum, and by what to multiply what
// was summed before, with the highest score until then in `highest`.
INLINE float soften(float* scores, int64_t vectors, float* highest, float* fade) {
  vf most = vf{} + *highest, sum = {};
  for (int64_t i = 0; i < vectors; i++) {
    const vf x = load(scores + i * VL);
    most = pick(x > most, x, most);
  }
  float high = most[0], total = 0.0f;
  for (int i = 1; i < VL; i++) high = most[i] > high ? most[i] : high;
  for (int64_t i = 0; i < vectors; i++) {
    const vf e = exp_(load(scores + i * VL) - high);
    store(scores + i * VL, e);
    sum += e;
  }
  for (int i = 0; i < VL; i++) total += sum[i];
  *fade = exp_(vf{} + (*highest - high))[0];
  *highest = high;
  return total;
}

int64_t attend_room(const Attention* a) {
  const int64_t keys = (a->keys < KEYS ? a->keys : KEYS) + 2 * VL, wide = a->width + VL;
  const int64_t queries = (a->queries + a->shares - 1) / a->shares;
  return (a->width + wide + SIX) * (keys + 16) + (SIX + 8) * wide + queries * (wide + 2) + 64;
}

void attend_head(Job* job, int64_t task, int64_t slot) {
  const Attention* a = job->attention;
  const int64_t share = task % a->shares, head = task / a->shares % a->heads, image = task / a->shares / a->heads, d = a->width;
  const int64_t first = share * a->queries / a->shares, last = (share + 1) * a->queries / a->shares;
  const int64_t vectors = (d + VL - 1) / VL, wide = vectors * VL, bf16 = job->bf16;
  const int64_t* q_step = a->strides, *k_step = a->strides + 3, *v_step = a->strides + 6;
  const int64_t q_at = image * q_step[0] + head * q_step[1], k_at = image * k_step[0] + head * k_step[1];
  const int64_t v_at = image * v_step[0] + head * v_step[1];
  const int64_t most = a->keys < KEYS ? a->keys : KEYS;
  int64_t pitch = (most + VL - 1) / VL * VL;
  if (pitch % 256 == 0) pitch += 16;  // or rows fall into the same cache sets
  float* turned = job->pack + slot * job->pack_size;  // [width][keys]
  float* values = turned + d * pitch;                 // [keys][wide]
  float* scores = values + pitch * wide;              // [six][keys]
  float* asked = scores + SIX * pitch;                // [six][wide]
  float* rows = asked + SIX * wide;                   // [eight][wide]
  float* sums = rows + 8 * wide;                      // [queries][wide]
  float* highest = sums + (last - first) * wide;      // [queries]
  float* totals = highest + (last - first);           // [queries]
  const float scale = 1.0f / __builtin_sqrtf((float)d);
  for (int64_t i = 0; i < last - first; i++) highest[i] = -__builtin_inff(), totals[i] = 0.0f;
  for (int64_t k0 = 0; k0 < a->keys; k0 += most) {
    const int64_t n = a->keys - k0 < most ? a->keys - k0 : most, key_vectors = (n + VL - 1) / VL;
    for (int64_t i = 0; i < n; i += 8) {
      const int64_t some = n - i < 8 ? n - i : 8;
      for (int64_t j = 0; j < some; j++) read_run(rows + j * wide, a->k, k_at + (k0 + i + j) * k_step[2], d, bf16);
      transpose(turned + i, pitch, rows, wide, some, d);
    }
    for (int64_t c = 0; c < d; c++)
      for (int64_t i = n; i < key_vectors * VL; i++) turned[c * pitch + i] = 0.0f;
    for (int64_t i = 0; i < n; i++) {
      read_run(values + i * wide, a->v, v_at + (k0 + i) * v_step[2], d, bf16);
      for (int64_t c = d; c < wide; c++) values[i * wide + c] = 0.0f;
    }
    for (int64_t t = first; t < last; t += SIX) {
      const int64_t m = last - t < SIX ? last - t : SIX;
      float* mine = sums + (t - first) * wide;
      for (int64_t i = 0; i < m; i++) {
        read_run(asked + i * wide, a->q, q_at + (t + i) * q_step[2], d, bf16);
        for (int64_t c = 0; c < d; c++) asked[i * wide + c] *= scale;
      }
      few_rows(m, asked, wide, turned, pitch, d, false, scores, pitch, key_vectors);
      for (int64_t i = 0; i < m; i++) {
        float fade;
        for (int64_t j = n; j < key_vectors * VL; j++) scores[i * pitch + j] = -__builtin_inff();
        float* total = totals + (t - first) + i;
        const float sum = soften(scores + i * pitch, key_vectors, highest + (t - first) + i, &fade);
        *total = k0 ? *total * fade + sum : sum;
        if (k0 && fade != 1.0f)
          for (int64_t v = 0; v < vectors; v++) store(mine + i * wide + v * VL, load(mine + i * wide + v * VL) * fade);
      }
      few_rows(m, scores, pitch, values, wide, n, k0 > 0, mine, wide, vectors);
    }
  }
  for (int64_t i = 0; i < last - first; i++) {
    float* mine = sums + i * wide;
    for (int64_t v = 0; v < vectors; v++) store(mine + v * VL, load(mine + v * VL) / totals[i]);
    write_run(job->y, ((image * a->queries + first + i) * a->heads + head) * d, mine, d, bf16);
  }
}

}  // namespace
#endif
