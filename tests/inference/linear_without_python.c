// Runs one kernel of a compiled library on random data and compares it with float64: also for another machine, under qemu,
// where there is neither Python nor torch (docs/releases.md). The argument is the library.
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { OUTPUTS = 37, INPUTS = 53, TOKENS = 29 };

typedef int64_t (*Pitch)(int64_t h);
typedef int64_t (*Linear)(const void* x, void* y, const float* bias, const int32_t* starts, const int32_t* index,
                          const void* values, int64_t rows, int64_t half, int64_t tokens, int64_t inputs, int64_t outputs,
                          int64_t h, int64_t g, int64_t activation, int64_t bf16, int64_t threads);

static float uniform(void) { return rand() / (float)RAND_MAX - 0.5f; }

int main(int count, char** arguments) {
  void* library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
  if (!library) {
    puts(count == 2 ? dlerror() : "the argument is a library");
    return 2;
  }
  Pitch pitch = (Pitch)dlsym(library, "spartan_lane_pitch");
  Linear linear = (Linear)dlsym(library, "spartan_linear");
  static float w[OUTPUTS][INPUTS], x[TOKENS][INPUTS], y[TOKENS][OUTPUTS], bias[OUTPUTS], values[OUTPUTS * INPUTS];
  static int32_t starts[OUTPUTS + 1], index[OUTPUTS * INPUTS];
  int kept = 0;
  for (int o = 0; o < OUTPUTS; o++) {
    bias[o] = uniform();
    for (int i = 0; i < INPUTS; i++) {
      if (rand() % 10) continue;
      w[o][i] = values[kept] = uniform();
      index[kept++] = (int32_t)(i * pitch(1));
    }
    starts[o + 1] = kept;
  }
  for (int t = 0; t < TOKENS; t++)
    for (int i = 0; i < INPUTS; i++) x[t][i] = uniform();
  for (int threads = 1; threads <= 2; threads++) {
    if (linear(x, y, bias, starts, index, values, 0, 0, TOKENS, INPUTS, OUTPUTS, 1, 1, 0, 0, threads)) return 2;
    double worst = 0;
    for (int t = 0; t < TOKENS; t++)
      for (int o = 0; o < OUTPUTS; o++) {
        double expected = bias[o];
        for (int i = 0; i < INPUTS; i++) expected += (double)w[o][i] * x[t][i];
        worst = fmax(worst, fabs(expected - y[t][o]));
      }
    printf("%d of %d weights, %d threads: within %.1e of float64\n", kept, OUTPUTS * INPUTS, threads, worst);
    if (!(worst < 1e-6)) return 1;
  }
  return 0;
}
