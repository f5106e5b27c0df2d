"""Spartan: train any PyTorch model to an exact sparsity budget."""

from typing import TYPE_CHECKING, Any

from spartan.files import load, save
from spartan.methods import Methods, package
from spartan.methods.dense import Dense
from spartan.methods.imp import IMP
from spartan.methods.spartan import Spartan
from spartan.methods.topkast import TopKAST
from spartan.ops import distillation_loss, hard_topk, soft_topk
from spartan.passes import passes
from spartan.problem.costs.flops import Flops
from spartan.problem.costs.params import Params
from spartan.problem.flops import flops
from spartan.problem.patterns import Unstructured
from spartan.problem.patterns.block import Block
from spartan.problem.patterns.channel import Channel
from spartan.problem.patterns.heads import Heads
from spartan.problem.patterns.nm import NM
from spartan.problem.schedules import constant, cosine, cubic, linear
from spartan.prune import prune
from spartan.shrink import shrink
from spartan.sparsifier import Sparsifier
from spartan.verify import remask, verify

if TYPE_CHECKING:
    from spartan.inference import accelerate, explain, export_onnx
    from spartan.state.sharded import load_sharded, save_sharded

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
    "accelerate",
    "constant",
    "cosine",
    "cubic",
    "distillation_loss",
    "explain",
    "export_onnx",
    "flops",
    "hard_topk",
    "linear",
    "load",
    "load_sharded",
    "methods",
    "passes",
    "prune",
    "remask",
    "save",
    "save_sharded",
    "shrink",
    "soft_topk",
    "verify",
]


def __getattr__(name: str) -> Any:
    # The sparse runtime needs torch's compiler, which takes a second to import: only for those who ask for it.
    if name in ("accelerate", "explain", "export_onnx"):
        from spartan import inference

        return getattr(inference, name)
    if name in ("load_sharded", "save_sharded"):  # so does torch.distributed.checkpoint
        from spartan.state import sharded

        return getattr(sharded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
