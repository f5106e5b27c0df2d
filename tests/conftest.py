"""Tests run with one thread: convolutions and optimizers start every thread even for a handful of weights."""

import contextlib
import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Without a GPU the kernels run through Triton's interpreter, which must be asked for before Triton is first
    # imported. Nothing that this process starts is to inherit the wish.
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ModuleNotFoundError):
        import triton

        triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]
