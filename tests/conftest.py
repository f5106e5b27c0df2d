"""Tests run with one thread: convolutions and optimizers start every thread even for a handful of weights."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
