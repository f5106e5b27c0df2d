// The sparse products, compiled once per instruction set (build.py); everything is static but the table at the end.
//
// rows:  outputs lie in the lanes. For blocks of 8 rows and more: a tile of tokens × h outputs stays in registers, each
//        packed input number is broadcast against h weights. Stores straight to token-major y.
// lanes: pixels or tokens lie in the lanes. For single weights and for convolutions: h outputs × a few vectors of lanes
//        stay in registers, each weight is broadcast against a run of the packed input.
// walk:  for one token or a few; in walk.h.
// Attention is in attend.h.
#include "attend.h"
#include "walk.h"

#ifndef SPARTAN_ISA
#define SPARTAN_ISA portable
#endif
#define NAME_(isa) spartan_kernels_##isa
#define NAME(isa) NAME_(isa)
#define TEXT_(isa) #isa
#define TEXT(isa) TEXT_(isa)

namespace {

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- rows ---------------------------------------------------------------------------------------------------------

// acc[m][v] += x[m][k] · w[k][v] over all entries of one group. x is packed [granule][M][G].
// An alignment does not survive as part of a template's argument, hence a type that names both.
struct Full { typedef vf V; typedef vfu U; typedef vhu H; typedef vw I; };
struct Eight { typedef v8 V; typedef v8u U; typedef h8u H; typedef w8 I; };

template <class T> INLINE typename T::V widened(const void* w, int64_t at, bool half) {
  typedef typename T::V V;
  if (half) return (V)(__builtin_convertvector(*(const typename T::H*)((const uint16_t*)w + at), typename T::I) << 16);
  return *(const typename T::U*)((const float*)w + at);
}

// Where a token or two make the weights' way from memory the longest, they are asked for ahead, and U partial sums each
// keep one addition from waiting for the other.
template <class T, int M, int NV, int G, bool HALF>
void rows_block(const float* x, const int32_t* granule, const void* w, int64_t at, int64_t n, int64_t h, const float* bias,
                float* out, int64_t pitch) {
  typedef typename T::V V;
  typedef typename T::U VU;
  constexpr int L = sizeof(V) / 4, U = M * NV <= 2 && G > 1 ? 2 : 1, BYTES = HALF ? 2 : 4;
  V acc[U][M][NV] = {};
  UNROLL for (int m = 0; m < M; m++) {
    UNROLL for (int v = 0; v < NV; v++) acc[0][m][v] = *(const VU*)(bias + L * v);
  }
  for (int64_t j = 0; j < n; j++, at += G * h) {
    const float* xs = x + (int64_t)granule[j] * (M * G);
    UNROLL for (int k = 0; k < G; k++) {
      V ws[NV];
      UNROLL for (int v = 0; v < NV; v++) {
        if (M <= 2 && (k + v) * L * BYTES % 64 == 0) __builtin_prefetch((const char*)w + (at + k * h + L * v) * BYTES + 4096);
        ws[v] = widened<T>(w, at + k * h + L * v, HALF);
      }
      UNROLL for (int m = 0; m < M; m++) {
        UNROLL for (int v = 0; v < NV; v++) acc[k % U][m][v] += xs[m * G + k] * ws[v];
      }
    }
  }
  UNROLL for (int m = 0; m < M; m++) {
    UNROLL for (int v = 0; v < NV; v++) {
      V sum = acc[0][m][v];
      if (U > 1) sum += acc[U - 1][m][v];
      *(VU*)(out + m * pitch + L * v) = sum;
    }
  }
}

typedef void (*RowsBlock)(const float*, const int32_t*, const void*, int64_t, int64_t, int64_t, const float*, float*, int64_t);

// How many tokens share a tile: as many as the registers hold, and small tiles for what is left over.
#if VL == 16
constexpr int M8 = 14, M16 = 14, M32 = 12, M64 = 6;
int64_t rows_tile(int64_t h) { return h == 8 ? M8 : h == 16 ? M16 : h == 32 ? M32 : M64; }
int64_t strip(int64_t h) { return h; }
#else
constexpr int M8 = 12, M16 = 6;
int64_t rows_tile(int64_t h) { return h == 8 ? M8 : M16; }
int64_t strip(int64_t h) { return h == 8 ? 8 : 16; }
#endif

template <class T, int FULL, int NV, int G, bool HALF> RowsBlock rows_sized(int64_t m) {
  switch (m) {
    case 1: return rows_block<T, 1, NV, G, HALF>;
    case 2: return rows_block<T, 2, NV, G, HALF>;
    case 4: return rows_block<T, 4, NV, G, HALF>;
    case 8: return rows_block<T, FULL < 8 ? FULL : 8, NV, G, HALF>;
    default: return rows_block<T, FULL, NV, G, HALF>;
  }
}
template <int G, bool HALF> RowsBlock rows_high(int64_t h, int64_t m) {
#if VL == 16
  if (h == 16) return rows_sized<Full, M16, 1, G, HALF>(m);
  if (h == 32) return rows_sized<Full, M32, 2, G, HALF>(m);
  if (h == 64) return rows_sized<Full, M64, 4, G, HALF>(m);
#else
  if (h >= 16) return rows_sized<Full, M16, 2, G, HALF>(m);
#endif
  return rows_sized<Eight, M8, 1, G, HALF>(m);
}
template <bool HALF> RowsBlock rows_of(int64_t h, int64_t g, int64_t m) {
  return g == 8 ? rows_high<8, HALF>(h, m) : g == 4 ? rows_high<4, HALF>(h, m) : rows_high<1, HALF>(h, m);
}

// Tokens that the tile starting at t computes: the full tile, or the smallest size that covers the rest.
int64_t tile_size(const Job* job, int64_t t) {
  int64_t rest = job->tokens - t, size = 1;
  if (rest >= job->tile) return job->tile;
  while (size < rest) size *= 2;
  return least(size, job->tile);
}

void rows_pack(Job* job, int64_t task, int64_t) {
  const int64_t t0 = task * job->tile, m = tile_size(job, t0), g = job->g, k = job->inputs;
  const int64_t granules = (k + g - 1) / g;
  float* to = job->pack + t0 * granules * g;
  float row[512];
  for (int64_t i = 0; i < m; i++) {
    const bool there = t0 + i < job->tokens;
    for (int64_t k0 = 0; k0 < granules * g; k0 += 512) {
      const int64_t n = least(512, granules * g - k0), real = there ? least(n, k - k0) : 0;
      const float* from = row;
      if (there && real == n && !job->bf16) from = (const float*)job->x + (t0 + i) * k + k0;
      else {
        if (there) read_run(row, job->x, (t0 + i) * k + k0, real, job->bf16);
        for (int64_t j = real; j < n; j++) row[j] = 0.0f;
      }
      float* at = to + (k0 / g * m + i) * g;
      if (g == 8) for (int64_t j = 0; j < n; j += 8) *(v8u*)(at + j * m) = *(const v8u*)(from + j);
      else if (g == 4) for (int64_t j = 0; j < n; j += 4) UNROLL for (int c = 0; c < 4; c++) at[j * m + c] = from[j + c];
      else for (int64_t j = 0; j < n; j++) at[j * m] = from[j];
    }
  }
}

void rows_multiply(Job* job, int64_t task, int64_t) {
  const int64_t t0 = task % job->tiles * job->tile, m = tile_size(job, t0), h = job->h, g = job->g, n = job->outputs;
  const int64_t first = task / job->tiles * job->chunk, last = least(first + job->chunk, job->groups), step = strip(h);
  const int64_t tokens = least(m, job->tokens - t0);
  const float* x = job->pack + t0 * ((job->inputs + g - 1) / g * g);
  const RowsBlock block = job->half ? rows_of<true>(h, g, m) : rows_of<false>(h, g, m);
  float scratch[16 * 64];
  for (int64_t r = first; r < last; r++) {
    const int64_t a = job->starts[r], entries = job->starts[r + 1] - a, width = least(h, n - r * h);
    const bool straight = tokens == m && width == h && !job->bf16;
    float* out = straight ? (float*)job->y + t0 * n + r * h : scratch;
    const int64_t pitch = straight ? n : h;
    for (int64_t c = 0; c < h; c += step)
      block(x, job->index + a, job->values, a * g * h + c, entries, h, job->bias + r * h + c, out + c, pitch);
    for (int64_t i = 0; i < tokens; i++) {
      if (job->activation != NONE) activate_run(out + i * pitch, h, job->activation);
      if (!straight) write_run(job->y, (t0 + i) * n + r * h, out + i * h, width, job->bf16);
    }
  }
}

// ---- lanes --------------------------------------------------------------------------------------------------------

constexpr int WIDEST = 8, TILE = WIDEST * VL;

// M outputs × P vectors of lanes; where that is fewer sums than an addition takes cycles, U partial sums each.
template <int M, int P>
void lanes_block(const float* x, const int32_t* offset, const float* w, int64_t n, int64_t h, const float* bias,
                 const float* residual, bool rectify, float* out, int64_t pitch) {
  constexpr int U = M * P >= 4 ? 1 : M * P >= 2 ? 2 : 4;
  vf acc[U][M][P] = {};
  int64_t j = 0;
  for (; j + U <= n; j += U) {
    UNROLL for (int u = 0; u < U; u++) {
      const float* xs = x + offset[j + u];
      const float* ws = w + (j + u) * h;
      UNROLL for (int p = 0; p < P; p++) {
        vf xv = load(xs + p * VL);
        UNROLL for (int m = 0; m < M; m++) acc[u][m][p] += ws[m] * xv;
      }
    }
  }
  for (; U > 1 && j < n; j++) {
    const float* xs = x + offset[j];
    UNROLL for (int p = 0; p < P; p++) {
      UNROLL for (int m = 0; m < M; m++) acc[0][m][p] += w[j * h + m] * load(xs + p * VL);
    }
  }
  UNROLL for (int m = 0; m < M; m++) {
    UNROLL for (int p = 0; p < P; p++) {
      vf sum = acc[0][m][p];
      UNROLL for (int u = 1; u < U; u++) sum += acc[u][m][p];
      sum += bias[m];
      if (residual) sum += load(residual + m * pitch + p * VL);
      store(out + m * pitch + p * VL, rectify ? relu(sum) : sum);
    }
  }
}

typedef void (*LanesBlock)(const float*, const int32_t*, const float*, int64_t, int64_t, const float*, const float*, bool,
                           float*, int64_t);

template <int M, int P> LanesBlock lanes_sized(int64_t p) {
  if constexpr (P > 1) {
    if (p < P) return lanes_sized<M, P - 1>(p);
  }
  return lanes_block<M, P>;
}
#if VL == 16
constexpr int HIGHEST = 8, P8 = 3, P4 = 6, P2 = 8;
#else
constexpr int HIGHEST = 4, P8 = 3, P4 = 3, P2 = 6;
#endif
// Vectors a tile of lanes may hold, so that h outputs (at most HIGHEST at a time) by that many sums fit the registers.
int64_t widest(int64_t h) { return h >= 8 ? P8 : h >= 4 ? P4 : h >= 2 ? P2 : WIDEST; }
LanesBlock lanes_of(int64_t m, int64_t p) {
  if (m == 8) return lanes_sized<HIGHEST, P8>(p);
  if (m == 4) return lanes_sized<4, P4>(p);
  if (m == 2) return lanes_sized<2, P2>(p);
  return lanes_sized<1, WIDEST>(p);
}

// All rows of group r over one tile of lanes.
INLINE void lanes_group(const Job* job, int64_t r, const float* x, int64_t p, int64_t rows, bool rectify,
                        const float* residual, float* out, int64_t pitch) {
  const int64_t a = job->starts[r], n = job->starts[r + 1] - a, h = job->h;
  for (int64_t i = 0; i < rows;) {
    int64_t m = HIGHEST;
    while (m > rows - i) m /= 2;
    lanes_of(m, p)(x, job->index + a, (const float*)job->values + a * h + i, n, h, job->bias + r * h + i,
                   residual ? residual + i * pitch : residual, rectify, out + i * pitch, pitch);
    i += m;
  }
}

struct Span { int64_t first, count; };  // in vectors
INLINE Span span_of(const Job* job, int64_t tile) {  // tiles of nearly equal size
  const int64_t a = tile * job->vectors / job->tiles, b = (tile + 1) * job->vectors / job->tiles;
  return {a, b - a};
}

void tokens_pack(Job* job, int64_t tile, int64_t) {
  const Span span = span_of(job, tile);
  const int64_t k = job->inputs, t0 = span.first * VL, n = span.count * VL, pitch = job->pitch;
  float* to = job->pack + tile * k * pitch;
  float block[8 * 64];
  for (int64_t t = 0; t < n; t += 8)
    for (int64_t k0 = 0; k0 < k; k0 += 64) {
      const int64_t width = least(64, k - k0);
      for (int64_t i = 0; i < 8; i++) {
        if (t0 + t + i < job->tokens) read_run(block + i * 64, job->x, (t0 + t + i) * k + k0, width, job->bf16);
        else for (int64_t j = 0; j < width; j++) block[i * 64 + j] = 0.0f;
      }
      transpose(to + k0 * pitch + t, pitch, block, 64, 8, width);
    }
}

void tokens_multiply(Job* job, int64_t task, int64_t) {
  const int64_t tile = task % job->tiles, h = job->h, n = job->outputs;
  const Span span = span_of(job, tile);
  const int64_t first = task / job->tiles * job->chunk, last = least(first + job->chunk, job->groups);
  const int64_t t0 = span.first * VL, tokens = least(span.count * VL, job->tokens - t0);
  const float* x = job->pack + tile * job->inputs * job->pitch;
  float sums[64 * TILE], turned[8 * 64];
  const int64_t batch = h >= 16 ? 1 : 16 / h;  // groups whose rows are written out together
  for (int64_t r = first; r < last; r += batch) {
    const int64_t end = least(r + batch, last), base = r * h, rows = least(end * h, n) - base;
    for (int64_t q = r; q < end; q++)
      lanes_group(job, q, x, span.count, least(h, n - q * h), job->activation == RELU, 0, sums + (q - r) * h * TILE, TILE);
    if (job->activation > RELU)
      for (int64_t i = 0; i < rows; i++) activate_run(sums + i * TILE, tokens, job->activation);
    if (!job->bf16) {
      transpose((float*)job->y + t0 * n + base, n, sums, TILE, rows, tokens);
      continue;
    }
    for (int64_t t = 0; t < tokens; t += 8) {
      const int64_t some = least(8, tokens - t);
      transpose(turned, 64, sums + t, TILE, rows, some);
      for (int64_t i = 0; i < some; i++) write_run(job->y, (t0 + t + i) * n + base, turned + i * 64, rows, 1);
    }
  }
}

// One channel of an image into [phase][rows_q][pitch], zeros around it. Phase (a, b) holds rows a, a + stride, …
void image_pack(Job* job, int64_t channel, int64_t) {
  const int64_t h = job->height, w = job->width, first = job->first_row, last = job->last_row;
  float row[4096];
  for (int64_t a = 0; a < job->phases_h; a++)
    for (int64_t b = 0; b < job->phases_w; b++) {
      float* to = job->pack + channel * job->plane + ((a * job->phases_w + b) * job->rows_q + first) * job->pitch;
      for (int64_t i = first; i < last; i++, to += job->pitch) {
        const int64_t from_row = i * job->stride_h + a - job->pad_h, shift = b - job->pad_w;
        if (from_row < 0 || from_row >= h) {
          for (int64_t j = 0; j < job->pitch; j++) to[j] = 0.0f;
          continue;
        }
        const int64_t at = (channel * h + from_row) * w;
        // Columns j with 0 ≤ j·stride + shift < w.
        const int64_t s = job->stride_w;
        int64_t low = shift < 0 ? (-shift + s - 1) / s : 0, high = shift < w ? (w - shift + s - 1) / s : 0;
        low = least(low, job->pitch);
        high = least(high, job->pitch);
        if (high < low) high = low;
        for (int64_t j = 0; j < low; j++) to[j] = 0.0f;
        if (s == 1) read_run(to + low, job->x, at + low + shift, high - low, job->bf16);
        else if (w <= 4096) {
          const float* from = row;
          if (job->bf16) widen_run(row, (const uint16_t*)job->x + at, w);
          else from = (const float*)job->x + at;
          if (s == 2) copy_evens(to + low, from + 2 * low + shift, high - low);
          else for (int64_t j = low; j < high; j++) to[j] = from[j * s + shift];
        } else
          for (int64_t j = low; j < high; j++) read_run(to + j, job->x, at + j * s + shift, 1, job->bf16);
        for (int64_t j = high; j < job->pitch; j++) to[j] = 0.0f;
      }
    }
}

// The larger ones; NaN, where one of two is.
INLINE void take_larger(float* a, const float* b, int64_t n) {
  int64_t j = 0;
  for (; j + VL <= n; j += VL) {
    const vf x = load(a + j), y = load(b + j);
    store(a + j, pick((y > x) | (y != y), y, x));
  }
  for (; j < n; j++) a[j] = (b[j] > a[j]) | (b[j] != b[j]) ? b[j] : a[j];
}

// The largest of each window, for a band of rows of one channel: of a window's rows, then of their neighbours. The windows'
// sizes are phases_h and phases_w.
void pool_windows(Job* job, int64_t task, int64_t) {
  constexpr int64_t WIDE = 2048;
  const int64_t h = job->height, w = job->width, channel = task % job->channels, band = task / job->channels;
  const int64_t kernel = job->phases_w, s = job->stride_w, each = (WIDE - kernel) / s + 1;
  float seen[WIDE], more[WIDE], most[WIDE];
  for (int64_t r = band * job->out_h / job->bands; r < (band + 1) * job->out_h / job->bands; r++) {
    const int64_t top = r * job->stride_h - job->pad_h, bottom = least(top + job->phases_h, h);
    for (int64_t c = 0; c < job->out_w; c += each) {
      const int64_t n = least(each, job->out_w - c), left = c * s - job->pad_w, wide = (n - 1) * s + kernel;
      const int64_t low = left < 0 ? -left : 0, high = least(wide, w - left);
      for (int64_t j = 0; j < wide; j++) seen[j] = -__builtin_inff();
      for (int64_t i = top < 0 ? 0 : top; i < bottom; i++) {
        const int64_t at = (channel * h + i) * w + left;
        const float* from = more;
        if (job->bf16) read_run(more + low, job->x, at + low, high - low, 1);
        else from = (const float*)job->x + at;
        take_larger(seen + low, from + low, high - low);
      }
      for (int64_t k = 0; k < kernel; k++) {
        float* to = k ? more : most;
        if (s == 2) copy_evens(to, seen + k, n);
        else for (int64_t j = 0; j < n; j++) to[j] = seen[j * s + k];
        if (k) take_larger(most, more, n);
      }
      write_run(job->y, (channel * job->out_h + r) * job->out_w + c, most, n, job->bf16);
    }
  }
}

// n sums of output row `row` of the plane, from column c on: residual, activation, and out.
INLINE void finish_run(const Job* job, float* sums, int64_t at, int64_t n) {
  if (job->residual) {
    float more[TILE];
    read_run(more, job->residual, at, n, job->bf16);
    for (int64_t i = 0; i < n; i++) sums[i] += more[i];
  }
  if (job->activation != NONE) activate_run(sums, n, job->activation);
  write_run(job->y, at, sums, n, job->bf16);
}

// Tasks of a tile follow each other: with a share of them, a thread has a part of the image's rows.
void image_multiply(Job* job, int64_t task, int64_t) {
  const int64_t h = job->h, n = job->outputs;
  const Span span = span_of(job, task / job->chunks);
  const int64_t first = task % job->chunks * job->chunk, last = least(first + job->chunk, job->groups);
  const int64_t l0 = job->first_lane + span.first * VL, lanes = least(span.count * VL, job->last_lane - l0);
  const int64_t size = job->out_h * job->out_w;
  const float* x = (job->direct ? (const float*)job->x : job->pack) + l0;
  // Straight to y where the lanes are the output's own pixels and none is left over.
  const bool straight = job->pitch == job->out_w && lanes == span.count * VL && !job->bf16;
  const bool rectify = job->activation == RELU && (straight || !job->residual);
  float sums[64 * TILE];
  for (int64_t r = first; r < last; r++) {
    const int64_t rows = least(h, n - r * h), plane = r * h * size;
    if (straight) {
      float* out = (float*)job->y + plane + l0;
      const float* residual = job->residual ? (const float*)job->residual + plane + l0 : 0;
      lanes_group(job, r, x, span.count, rows, rectify, residual, out, size);
      if (job->activation > RELU)
        for (int64_t i = 0; i < rows; i++) activate_run(out + i * size, lanes, job->activation);
      continue;
    }
    lanes_group(job, r, x, span.count, rows, rectify, 0, sums, TILE);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t l = l0; l < l0 + lanes;) {  // row by row, without the columns that only the padding has
        const int64_t y = l / job->pitch, c = l - y * job->pitch, end = least(l0 + lanes, (y + 1) * job->pitch);
        const int64_t some = least(end, y * job->pitch + job->out_w) - l;
        if (some > 0) finish_run(job, sums + i * TILE + l - l0, plane + i * size + y * job->out_w + c, some);
        l = end;
      }
  }
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) const Kernels NAME(SPARTAN_ISA) = {
    TEXT(SPARTAN_ISA), VL, widest, rows_tile, walk_most, attend_room, rows_pack, rows_multiply, tokens_pack, tokens_multiply, image_pack,
    image_multiply, walk_pack, walk_multiply, pool_windows, attend_head};
