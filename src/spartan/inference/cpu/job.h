// What one call of a sparse layer needs, shared by dispatch.cpp (threads, C ABI) and kernels.cpp (one object per instruction set).
#ifndef SPARTAN_JOB_H
#define SPARTAN_JOB_H
#include <stdint.h>

enum Activation { NONE = 0, RELU = 1, GELU = 2, GELU_TANH = 3, SILU = 4 };

struct Job;
typedef void (*Task)(struct Job*, int64_t task, int64_t slot);

// Attention without masks; strides of q, k and v: from image to image, head to head, token to token, of which each is a run.
struct Attention {
  const void *q, *k, *v;
  const int64_t* strides;
  int64_t heads, queries, keys, width, shares;  // a head's queries go in so many shares
};

// The weight, in "rows" and "lanes": rows are taken h at a time; `starts` bounds each group's entries, an entry being one
// column (or g columns in a row) in which some row of the group is not zero. `values` holds h·g numbers an entry.
struct Job {
  const void* x;
  void* y;
  const float* bias;      // per row of every group
  const void* residual;   // like y, or null; added before the activation
  const int32_t* starts;  // groups + 1
  const int32_t* index;   // "rows": granule number; "lanes": offset of the column's first lane in the packed input
  const void* values;     // "rows": [entry][g][h]; "walk": [slot][16]; "lanes": [entry][h], floats
  int64_t half;           // "rows" and "walk": the values are bfloat16
  const uint8_t* places;  // "walk" only, as `windows`: see walk.h; `index` is then the output of each row
  const uint16_t* windows;
  float* pack;            // scratch for the rearranged input
  int64_t outputs, groups, h, g, activation, bf16;
  int64_t chunk, chunks;  // groups a task takes, and how many such chunks there are
  // linear: tokens × inputs
  int64_t tokens, inputs;
  int64_t tile, tiles;    // tokens that a tile holds, and how many tiles
  int64_t piece;          // tokens that one thread takes through both steps
  Task rearrange, multiply;
  // convolution: the packed input is [channel][phase][rows_q][pitch], see lay_out_conv() in ops.py
  int64_t images, channels, height, width, stride_h, stride_w, pad_h, pad_w, phases_h, phases_w, rows_q, pitch, plane;
  int64_t out_h, out_w;
  int64_t bands;          // runs of rows that an image is cut into
  int64_t first_row, last_row;    // of each phase, to pack
  int64_t first_lane, last_lane;  // to compute
  int64_t vectors;        // the same in vectors
  int64_t direct;         // read x itself: nothing to rearrange
  int64_t pack_size;      // floats of scratch an image or a piece takes
  const struct Attention* attention;
};

struct Kernels {
  const char* name;
  int64_t vector;               // floats in a vector
  int64_t (*widest)(int64_t h);  // vectors in the widest tile of lanes
  int64_t (*rows_tile)(int64_t h);
  int64_t (*walk_most)();        // tokens that one pass of "walk" takes
  int64_t (*attend_room)(const struct Attention*);  // floats of scratch that a thread takes
  Task rows_pack, rows_multiply, tokens_pack, tokens_multiply, image_pack, image_multiply, walk_pack, walk_multiply, pool_windows;
  Task attend_head;
};
#endif
