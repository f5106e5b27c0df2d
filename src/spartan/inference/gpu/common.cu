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
    // As in kernel.py: z Φ(z), with Φ(−|z|) = 2^(r(|z|) − z²/2 · log₂e), r being a fit, to 4e-6 of Φ.
    const float s = fminf(fabsf(z), 5.f);
    float r = ((6.09706691e-05f - 1.78361305e-06f * s) * s - 0.000928166063f) * s + 0.00850680171f;
    r = (((r * s - 0.0539705566f) * s + 0.262902045f) * s - 1.15125994f) * s - 0.999994711f;
    const float tail = exp2f(r - 0.7213475204444817f * z * z);
    return z * (z < 0.f ? tail : 1.f - tail);
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
