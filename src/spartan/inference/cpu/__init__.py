"""Sparse kernels for the CPU: C++ sources, their build, and the calls."""
