"""Spartan: train any PyTorch model to an exact sparsity budget."""

from typing import TYPE_CHECKING, Any

from spartan.costs import Flops, Params
from spartan.files import load, save
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

if TYPE_CHECKING:
    from spartan.inference import accelerate, explain, export_onnx
    from spartan.sharded_checkpoint import load_sharded, save_sharded

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
    "explain",
    "export_onnx",
    "flops",
    "hard_topk",
    "linear",
    "load",
    "load_sharded",
    "methods",
    "prune",
    "save",
    "save_sharded",
    "soft_topk",
]


def __getattr__(name: str) -> Any:
    # The sparse runtime needs torch's compiler, which takes a second to import: only for those who ask for it.
    if name in ("accelerate", "explain", "export_onnx"):
        from spartan import inference

        return getattr(inference, name)
    if name in ("load_sharded", "save_sharded"):  # so does torch.distributed.checkpoint
        from spartan import sharded_checkpoint

        return getattr(sharded_checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
