"""Triton kernels: what `ops` does in plain torch, for all targets in one launch and without waiting for the host."""
