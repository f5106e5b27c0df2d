"""Triton kernels over all targets at once, and the solvers that launch them."""
