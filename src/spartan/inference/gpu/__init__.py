"""Runs sparse linear layers on CUDA devices: on tiles, in Triton, and by torch's own 2:4 product."""
