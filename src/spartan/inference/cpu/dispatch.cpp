// The C interface: picks the kernels for this processor, cuts the work into tasks, runs them on torch's own threads.
#include <new>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "job.h"

extern "C" const Kernels spartan_kernels_portable;
#if defined(__x86_64__)
extern "C" const Kernels spartan_kernels_avx2, spartan_kernels_avx512;
#endif

namespace {

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
// GOMP_parallel of the OpenMP that torch has loaded, so that there is one pool of threads, and omp_get_thread_num.
Parallel openmp = nullptr;
int (*thread_number)() = nullptr;

#if defined(__x86_64__)
// The processor is asked itself: __builtin_cpu_supports needs a table that not every compiler brings (zig's does not).
const Kernels* best() {
  unsigned a, b, c, d, saved, more;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return &spartan_kernels_portable;
  const bool fma = c >> 12 & 1, knows_xgetbv = c >> 27 & 1;
  if (!fma || !knows_xgetbv || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return &spartan_kernels_portable;
  __asm__("xgetbv" : "=a"(saved), "=d"(more) : "c"(0));  // which registers the system saves
  const bool avx2 = b >> 5 & 1, avx512 = (b >> 16 & b >> 17 & b >> 30 & b >> 31) & 1;  // F, DQ, BW and VL
  if (avx512 && (saved & 0xe6) == 0xe6) return &spartan_kernels_avx512;
  return avx2 && (saved & 6) == 6 ? &spartan_kernels_avx2 : &spartan_kernels_portable;
}
#else
const Kernels* best() { return &spartan_kernels_portable; }
#endif
const Kernels* kernels = best();

// A thread's share of the tasks: the ones that follow each other, the same at every call. So a thread mostly reads what it
// wrote itself; what another core has written comes slowly where that is a far one. Whoever is done takes from the others.
// Each share has cache lines of its own, as other threads write to the next one.
struct alignas(128) Share { int64_t next, end; };
constexpr int64_t MOST_THREADS = 256;
struct Team {
  Job* job;
  Task task;
  int64_t threads;
  Share shares[MOST_THREADS];
};

void work(Team* team, int64_t me) {
  for (int64_t i = 0; i < team->threads; i++) {
    Share* share = &team->shares[(me + i) % team->threads];
    while (__atomic_load_n(&share->next, __ATOMIC_RELAXED) < share->end) {
      const int64_t task = __atomic_fetch_add(&share->next, 1, __ATOMIC_RELAXED);
      if (task < share->end) team->task(team->job, task, me);
    }
  }
}
void work_here(void* team) { work(static_cast<Team*>(team), thread_number()); }

// Every task by one of the threads; it is told which, as a number below `threads`.
void run(Job* job, Task task, int64_t tasks, int64_t threads) {
  if (threads > tasks) threads = tasks;
  if (threads <= 1) {
    for (int64_t i = 0; i < tasks; i++) task(job, i, 0);
    return;
  }
  Team team;
  team.job = job, team.task = task, team.threads = threads;
  for (int64_t i = 0; i < threads; i++) team.shares[i] = {i * tasks / threads, (i + 1) * tasks / threads};
  if (openmp) return openmp(work_here, &team, static_cast<unsigned>(threads), 0);
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; i++) others.emplace_back(work, &team, i);
  work(&team, 0);
  for (auto& thread : others) thread.join();
}

// Scratch that stays with the calling thread: fresh pages cost more than filling them.
struct Scratch {
  float* data = nullptr;
  int64_t size = 0;
  ~Scratch() { ::operator delete(data, std::align_val_t(64)); }
  float* take(int64_t floats) {
    if (floats > size) {
      ::operator delete(data, std::align_val_t(64));
      data = nullptr, size = 0;
      data = static_cast<float*>(::operator new(static_cast<size_t>(floats) * 4, std::align_val_t(64), std::nothrow));
      if (data) size = floats;
    }
    return data;
  }
};
thread_local Scratch scratch;

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t most_threads(int64_t threads) { return threads < MOST_THREADS ? threads : MOST_THREADS; }

// Groups a task takes: weights that stay in the second-level cache, and tasks enough for the threads to end together.
void cut(Job* job, int64_t threads) {
  const int64_t entries = job->starts[job->groups], bytes = entries * ((job->half ? 2 : 4) * job->h * job->g + 4);
  int64_t chunks = bytes ? up(bytes, 512 << 10) : 1;
  const int64_t others = job->tiles * job->images;
  if (threads > 1 && chunks * others < 6 * threads) chunks = up(6 * threads, others);
  const int64_t round = job->h >= 16 ? 1 : 16 / job->h;  // whole vectors of outputs
  job->chunk = up(up(job->groups, chunks), round) * round;
  job->chunks = up(job->groups, job->chunk);
}

// The job for image i alone, packed in the given slot of the scratch.
Job image_of(const Job& job, int64_t i, int64_t slot) {
  Job one = job;
  const int64_t bytes = job.bf16 ? 2 : 4, out = i * job.outputs * job.out_h * job.out_w * bytes;
  one.x = static_cast<const char*>(job.x) + i * job.channels * job.height * job.width * bytes;
  one.y = static_cast<char*>(job.y) + out;
  if (job.residual) one.residual = static_cast<const char*>(job.residual) + out;
  if (job.pack) one.pack = job.pack + slot * job.pack_size;
  return one;
}

// The job for some rows of the output.
void take_rows(Job* job, int64_t first, int64_t last) {
  job->first_row = first, job->last_row = last + job->rows_q - job->out_h;
  job->first_lane = first * job->pitch;
  job->last_lane = (last - 1) * job->pitch + job->out_w;  // nobody keeps those behind a row
  job->vectors = up(job->last_lane - job->first_lane, kernels->vector);
  job->tiles = up(job->vectors, kernels->widest(job->h));
}

// A band of an image's rows by one thread: packed, with the rows around that it needs, and multiplied by all weights.
void whole_band(Job* job, int64_t i, int64_t slot) {
  Job one = image_of(*job, i / job->bands, slot);
  const int64_t band = i % job->bands;
  take_rows(&one, band * job->out_h / job->bands, (band + 1) * job->out_h / job->bands);
  if (!one.direct)
    for (int64_t c = 0; c < one.channels; c++) kernels->image_pack(&one, c, 0);
  for (int64_t c = 0; c < one.chunks; c++)  // a chunk's weights stay in the cache
    for (int64_t t = 0; t < one.tiles; t++) kernels->image_multiply(&one, t * one.chunks + c, 0);
}

// Tiles of a linear layer's tokens: a fixed number of tokens ("rows") or of vectors ("lanes").
void tile_tokens(Job* job) {
  if (job->multiply == kernels->tokens_multiply) {
    job->vectors = up(job->tokens, kernels->vector);
    job->tiles = up(job->vectors, kernels->widest(job->h));
  } else {
    job->tiles = up(job->tokens, job->tile);
  }
}

// A run of tokens by one thread: packed, and multiplied by all weights while it is in the cache.
void whole_piece(Job* job, int64_t i, int64_t slot) {
  Job one = *job;
  const int64_t bytes = job->bf16 ? 2 : 4, first = i * job->piece;
  one.tokens = job->tokens - first < job->piece ? job->tokens - first : job->piece;
  one.x = static_cast<const char*>(job->x) + first * job->inputs * bytes;
  one.y = static_cast<char*>(job->y) + first * job->outputs * bytes;
  one.pack = job->pack + slot * job->pack_size;
  tile_tokens(&one);
  for (int64_t t = 0; t < one.tiles; t++) one.rearrange(&one, t, 0);
  for (int64_t t = 0; t < one.tiles * one.chunks; t++) one.multiply(&one, t, 0);
}

// `row` floats of scratch a token.
int64_t linear(Job* job, int64_t row, int64_t threads) {
  if (job->tokens == 0) return 0;
  const int64_t tile = job->tile;
  tile_tokens(job);
  // A piece: as many tiles as the second-level cache holds beside the weights, of nearly equal size.
  const int64_t fit = (384 << 10) / (row * tile * 4), most = fit < 1 ? 1 : fit;
  const int64_t pieces = up(job->tiles, most);
  if (threads == 1 || pieces >= 3 * threads) {
    job->piece = up(job->tiles, pieces) * tile;
    if (job->multiply == kernels->tokens_multiply && most == 1) job->piece = up(job->vectors, pieces) * kernels->vector;
    job->pack_size = up(job->piece, tile) * tile * row;
    job->pack = scratch.take(threads * job->pack_size);
    if (!job->pack) return 1;
    cut(job, 1);
    run(job, whole_piece, up(job->tokens, job->piece), threads);
    return 0;
  }
  job->pack = scratch.take(job->tiles * tile * row);
  if (!job->pack) return 1;
  cut(job, threads);
  run(job, job->rearrange, job->tiles, threads);
  run(job, job->multiply, job->tiles * job->chunks, threads);
  return 0;
}

}  // namespace

extern "C" {

#define PUBLIC __attribute__((visibility("default")))

PUBLIC int64_t spartan_version() { return 5; }
PUBLIC const char* spartan_isa() { return kernels->name; }
// For tests and for measuring: 0 if this processor cannot run it.
PUBLIC int64_t spartan_use_isa(int64_t level) {
  const Kernels* top = best();
  const Kernels* wanted = &spartan_kernels_portable;
#if defined(__x86_64__)
  if (level == 1) wanted = &spartan_kernels_avx2;
  if (level == 2) wanted = &spartan_kernels_avx512;
  if (level == 2 && top != &spartan_kernels_avx512) return 0;
  if (level == 1 && top == &spartan_kernels_portable) return 0;
#else
  if (level > 0) return 0;
#endif
  kernels = level < 0 ? top : wanted;
  return 1;
}
PUBLIC void spartan_use_openmp(Parallel parallel, int (*number)()) { openmp = parallel, thread_number = number; }
// Lanes between two columns of the packed input of `spartan_linear` without `rows`.
PUBLIC int64_t spartan_lane_pitch(int64_t h) { return kernels->widest(h) * kernels->vector; }

// Each returns 0, or 1 when there is no memory for the scratch.
// `rows` says which of the two kernels; without it g is 1 and the values are floats (`half`: bfloat16).
PUBLIC int64_t spartan_linear(const void* x, void* y, const float* bias, const int32_t* starts, const int32_t* index,
                              const void* values, int64_t rows, int64_t half, int64_t tokens, int64_t inputs,
                              int64_t outputs, int64_t h, int64_t g, int64_t activation, int64_t bf16, int64_t threads) {
  Job job = {};
  job.x = x, job.y = y, job.bias = bias, job.starts = starts, job.index = index, job.values = values;
  job.tokens = tokens, job.inputs = inputs, job.outputs = outputs, job.h = h, job.g = g;
  job.activation = activation, job.bf16 = bf16, job.half = half, job.images = 1;
  job.groups = up(outputs, h);
  job.tile = job.pitch = rows ? kernels->rows_tile(h) : spartan_lane_pitch(h);
  job.rearrange = rows ? kernels->rows_pack : kernels->tokens_pack;
  job.multiply = rows ? kernels->rows_multiply : kernels->tokens_multiply;
  return linear(&job, up(inputs, g) * g, most_threads(threads));
}

// One token or a few, see walk.h; more are taken a few at a time.
PUBLIC int64_t spartan_walk(const void* x, void* y, const float* bias, const int32_t* starts, const int32_t* rows,
                            const uint16_t* windows, const uint8_t* places, const void* values, int64_t tokens, int64_t inputs,
                            int64_t outputs, int64_t half, int64_t activation, int64_t bf16, int64_t threads) {
  Job job = {};
  job.bias = bias, job.starts = starts, job.index = rows, job.windows = windows, job.places = places, job.values = values;
  job.inputs = inputs, job.outputs = outputs, job.half = half, job.activation = activation, job.bf16 = bf16;
  job.groups = up(outputs, 16);
  job.pitch = up(inputs, 16) * 16 + 128;  // a window may reach beyond the last input
  const int64_t most = kernels->walk_most(), bytes = bf16 ? 2 : 4;
  // Eight tasks a thread, so that threads end together; of whole 128 rows where there are many, or two threads would
  // write to the same lines of y: these rows are stored in an order of their own.
  threads = most_threads(threads);
  const int64_t chunk = up(job.groups, 8 * threads);
  job.chunk = chunk > 8 ? up(chunk, 8) * 8 : chunk;
  job.pack = scratch.take((tokens < most ? tokens <= 3 ? tokens : most : most) * job.pitch);
  if (!job.pack) return 1;
  for (int64_t first = 0; first < tokens; first += most) {
    job.tokens = tokens - first < most ? tokens - first : most;
    job.x = static_cast<const char*>(x) + first * inputs * bytes;
    job.y = static_cast<char*>(y) + first * outputs * bytes;
    // To wake the other threads takes longer than to copy a token.
    run(&job, kernels->walk_pack, up(inputs, 512), job.tokens > 2 ? threads : 1);
    run(&job, kernels->walk_multiply, up(job.groups, job.chunk), threads);
  }
  return 0;
}

// Packs for spartan_walk: rows `begin` to `end` of the list of weights, whose columns are given, 16 rows a group. Returns the
// number of slots; with `starts` it also fills in all that follows, `sources` with each value's number in the list, or −1.
PUBLIC int64_t spartan_walk_slots(const int64_t* begin, const int64_t* end, const int32_t* columns, int64_t groups,
                                  int32_t* starts, uint16_t* windows, uint8_t* places, int64_t* sources) {
  int64_t slots = 0;
  for (int64_t g = 0; g < groups; g++, begin += 16, end += 16) {
    int64_t at[16];
    for (int k = 0; k < 16; k++) at[k] = begin[k];
    if (starts) starts[g] = static_cast<int32_t>(slots);
    for (;; slots++) {
      int64_t first = INT64_MAX;
      for (int k = 0; k < 16; k++)
        if (at[k] < end[k] && columns[at[k]] < first) first = columns[at[k]];
      if (first == INT64_MAX) break;
      const int64_t low = first / 16 * 16;
      if (starts) windows[slots] = static_cast<uint16_t>(low / 16);
      for (int k = 0; k < 16; k++) {
        const bool take = at[k] < end[k] && columns[at[k]] < low + 128;
        if (starts) sources[slots * 16 + k] = take ? at[k] : -1;
        at[k] += take;
        // A row without a weight here repeats the place of its last one, where the window still has it.
        const int64_t place = at[k] > begin[k] ? columns[at[k] - 1] - low : -1;
        if (starts) places[slots * 16 + k] = static_cast<uint8_t>(place >= 0 ? place : 128);
      }
    }
  }
  if (starts) starts[groups] = static_cast<int32_t>(slots);
  return slots;
}

// geometry: images, channels, height, width, stride (2), padding (2), phases (2), rows_q, pitch, plane, out_h, out_w, direct
PUBLIC int64_t spartan_conv(const void* x, void* y, const float* bias, const void* residual, const int32_t* starts,
                            const int32_t* index, const float* values, const int64_t* geometry, int64_t outputs, int64_t h,
                            int64_t activation, int64_t bf16, int64_t threads) {
  Job job = {};
  threads = most_threads(threads);
  job.x = x, job.y = y, job.bias = bias, job.residual = residual;
  job.starts = starts, job.index = index, job.values = values;
  job.outputs = outputs, job.h = h, job.g = 1, job.activation = activation, job.bf16 = bf16;
  const int64_t* at = geometry;
  job.images = *at++, job.channels = *at++, job.height = *at++, job.width = *at++;
  job.stride_h = *at++, job.stride_w = *at++, job.pad_h = *at++, job.pad_w = *at++;
  job.phases_h = *at++, job.phases_w = *at++, job.rows_q = *at++, job.pitch = *at++, job.plane = *at++;
  job.out_h = *at++, job.out_w = *at++, job.direct = *at++;
  if (job.images == 0) return 0;
  job.groups = up(outputs, h);
  take_rows(&job, 0, job.out_h);
  // A tile may read past the last channel's plane, into lanes nobody keeps.
  const int64_t images = job.images, size = job.channels * job.plane + 8 * kernels->vector + job.pitch;
  if (!job.direct) job.pack = scratch.take(threads * size);
  if (!job.direct && !job.pack) return 1;
  job.images = 1, job.pack_size = size;
  // As many images as divide among the threads go whole, one to a thread; the rest one after another, all threads on each: in
  // bands of rows, or where rows are too few for that by outputs. Either way a thread mostly reads what it wrote, of this
  // layer and of the one before.
  const int64_t whole = images / threads * threads, high = up(job.out_h, threads) * job.pitch;
  job.bands = 1;
  cut(&job, 1);
  run(&job, whole_band, whole, threads);
  const bool banded = !job.direct && 20 * threads * up(high, kernels->vector) <= 21 * job.vectors;
  for (int64_t i = whole; i < images; i++) {
    Job one = image_of(job, i, 0);
    one.bands = banded ? threads : 1;
    if (banded) {
      run(&one, whole_band, threads, threads);
      continue;
    }
    cut(&one, threads);
    if (!one.direct) run(&one, kernels->image_pack, one.channels, threads);
    run(&one, kernels->image_multiply, one.tiles * one.chunks, threads);
  }
  return 0;
}

// geometry: channels of all images, height, width, window (2), stride (2), padding (2), out_h, out_w,
// images
PUBLIC int64_t spartan_pool(const void* x, void* y, const int64_t* geometry, int64_t, int64_t bf16, int64_t threads) {
  Job job = {};
  threads = most_threads(threads);
  job.x = x, job.y = y, job.bf16 = bf16;
  const int64_t* at = geometry;
  job.channels = *at++, job.height = *at++, job.width = *at++, job.phases_h = *at++, job.phases_w = *at++;
  job.stride_h = *at++, job.stride_w = *at++, job.pad_h = *at++, job.pad_w = *at++, job.out_h = *at++, job.out_w = *at++;
  const int64_t images = *at++;
  // As in a convolution: whole images to a thread, or bands of rows.
  job.bands = images >= threads ? 1 : threads < job.out_h ? threads : job.out_h;
  run(&job, kernels->pool_windows, job.channels * job.bands, threads);
  return 0;
}

// geometry: images, heads, queries, keys, width of a head, and strides of q, k and v (3 each)
PUBLIC int64_t spartan_attend(const void* q, void* y, const void* k, const void* v, const int64_t* geometry, int64_t,
                              int64_t bf16, int64_t threads) {
  const int64_t* at = geometry;
  const int64_t images = *at++;
  Attention attention = {q, k, v, geometry + 5, at[0], at[1], at[2], at[3], 1};
  Job job = {};
  job.y = y, job.bf16 = bf16, job.attention = &attention;
  const int64_t all = images * attention.heads;
  if (all == 0 || attention.queries == 0) return 0;
  threads = most_threads(threads);
  // Each share packs all keys for itself: more than one only where there are too few heads for the threads to end together.
  if (all % threads && all < 6 * threads) {
    const int64_t shares = up(6 * threads, all), most = up(attention.queries, 24);
    attention.shares = shares < most ? shares : most;
  }
  job.pack_size = kernels->attend_room(&attention);
  job.pack = scratch.take(threads * job.pack_size);
  if (!job.pack) return 1;
  run(&job, kernels->attend_head, all * attention.shares, threads);
  return 0;
}
}
