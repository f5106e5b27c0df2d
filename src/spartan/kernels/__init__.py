"""What `ops` does in plain torch, faster: Triton kernels over all targets at once, and chunks on a CPU."""
