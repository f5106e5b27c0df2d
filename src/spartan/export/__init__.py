"""Smaller on disk, faster to run: packed files, and models whose layers run sparse kernels."""

from typing import TYPE_CHECKING, Any

from spartan.export.inspect import inspect
from spartan.export.load import load, read
from spartan.export.pack import save

if TYPE_CHECKING:
    from spartan.export.convert import accelerate, explain
    from spartan.export.onnx import export_onnx

__all__ = ["accelerate", "explain", "export_onnx", "inspect", "load", "read", "save"]


def __getattr__(name: str) -> Any:
    # They import torch's compiler, which takes a second.
    if name in ("accelerate", "explain"):
        from spartan.export import convert

        return getattr(convert, name)
    if name == "export_onnx":
        from spartan.export.onnx import export_onnx

        return export_onnx
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
