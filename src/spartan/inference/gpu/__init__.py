"""Sparse kernels for CUDA devices: linear layers on tiles, in Triton, and torch's own 2:4 product."""
