"""Runs models on sparse kernels, chosen by measurement, and exports them to ONNX."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spartan.inference.convert import accelerate, explain
    from spartan.inference.onnx import export_onnx

__all__ = ["accelerate", "explain", "export_onnx"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # They import torch's compiler, which takes a second.
    from spartan.inference import convert, onnx

    return getattr(onnx if name == "export_onnx" else convert, name)
