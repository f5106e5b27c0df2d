"""How a problem is answered: in plain torch, in chunks on a CPU, over shards, or by Triton kernels; one interface."""
