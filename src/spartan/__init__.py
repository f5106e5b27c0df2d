"""Spartan: train any PyTorch model to an exact sparsity budget."""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spartan.files import load, save
    from spartan.inference import accelerate, explain, export_onnx
    from spartan.methods import package as methods
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
    from spartan.state.sharded import load_sharded, save_sharded
    from spartan.verify import remask, verify

__version__ = "0.1.0"  # the only place: pyproject.toml reads it here

# Where each public name is: they are imported when they are first asked for, so that `spartan --help` needs no torch.
# A test holds this against the imports above, which are for readers and type checkers.
_HOMES = {
    "IMP": "methods.imp",
    "NM": "problem.patterns.nm",
    "Block": "problem.patterns.block",
    "Channel": "problem.patterns.channel",
    "Dense": "methods.dense",
    "Flops": "problem.costs.flops",
    "Heads": "problem.patterns.heads",
    "Params": "problem.costs.params",
    "Sparsifier": "sparsifier",
    "Spartan": "methods.spartan",
    "TopKAST": "methods.topkast",
    "Unstructured": "problem.patterns",
    "accelerate": "inference",
    "constant": "problem.schedules",
    "cosine": "problem.schedules",
    "cubic": "problem.schedules",
    "distillation_loss": "ops",
    "explain": "inference",
    "export_onnx": "inference",
    "flops": "problem.flops",
    "hard_topk": "ops",
    "linear": "problem.schedules",
    "load": "files",
    "load_sharded": "state.sharded",
    "methods": "methods",
    "passes": "passes",
    "prune": "prune",
    "remask": "verify",
    "save": "files",
    "save_sharded": "state.sharded",
    "shrink": "shrink",
    "soft_topk": "ops",
    "verify": "verify",
}

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


class _Package(types.ModuleType):
    """What `spartan` is: a class, and no function `__getattr__`, so that type checkers still find misspelt names."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        except ImportError as error:
            if (error.name or "").partition(".")[0] == __name__:  # a file of ours is gone, or another's is in its place
                from spartan_sparsity import conflict

                if why := conflict():
                    raise ImportError(f"{error}: {why}", name=error.name) from error
            raise
        # The package `spartan.methods` is also what lists the methods when called.
        value = home if name == "methods" else getattr(home, name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python binds a module to its name when it is imported; `spartan.prune` is to stay the function of that module.
        if isinstance(value, types.ModuleType) and name in _HOMES and name != "methods":
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
