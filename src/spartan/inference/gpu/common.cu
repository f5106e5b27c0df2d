// What the kernels share. They are compiled at run time, ptx.cu and this file before each, with constants given as macros: HALF
// (0: bfloat16, 1: float16), ACT (the activation's number), ALIGNED (rows of x begin at 16 bytes and have a multiple of 16
// columns), and those that a kernel names.
//
// With few tokens a kernel lasts a few microseconds, of which starting, and waiting for the first bytes, would take most. So
// everything that does not depend on the tokens is asked for before `wait_for_previous`: with programmatic dependent launch
// that happens while the kernel before is still running.

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

// Two neighbouring inputs of a token in a word; zeros from `columns` on.
INLINE u32 two_inputs(const u16* from, int column, int columns) {
#if ALIGNED
    return column < columns ? *reinterpret_cast<const u32*>(from + column) : 0;
#else
    const u32 a = column < columns ? from[column] : 0, b = column + 1 < columns ? from[column + 1] : 0;
    return a | b << 16;
#endif
}
