"""Spartan: train any PyTorch model to an exact sparsity budget."""

from spartan.costs import Flops, Params
from spartan.flop_count import flops
from spartan.heads import Heads
from spartan.methods import Methods, package
from spartan.methods.dense import Dense
from spartan.methods.imp import IMP
from spartan.methods.spartan import Spartan
from spartan.methods.topkast import TopKAST
from spartan.oneshot import prune
from spartan.ops import hard_topk, soft_topk
from spartan.patterns import NM, Block, Channel, Unstructured
from spartan.schedules import constant, cosine, cubic, linear
from spartan.sparsifier import Sparsifier

__version__ = "0.1.0"

# The package `spartan.methods` is also what lists the methods when called.
methods: Methods = package

__all__ = [
    "IMP",
    "NM",
    "Block",
    "Channel",
    "Dense",
    "Flops",
    "Heads",
    "Params",
    "Sparsifier",
    "Spartan",
    "TopKAST",
    "Unstructured",
    "__version__",
    "constant",
    "cosine",
    "cubic",
    "flops",
    "hard_topk",
    "linear",
    "methods",
    "prune",
    "soft_topk",
]
