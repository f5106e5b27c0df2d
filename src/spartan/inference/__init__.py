"""Runs models on sparse kernels, chosen by measurement, and exports them to ONNX."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spartan.inference.convert import accelerate, explain
    from spartan.inference.onnx import export_onnx

__all__ = ["accelerate", "explain", "export_onnx"]


def __getattr__(name: str) -> Any:
    # They import torch's compiler, which takes a second.
    if name in ("accelerate", "explain"):
        from spartan.inference import convert

        return getattr(convert, name)
    if name == "export_onnx":
        from spartan.inference.onnx import export_onnx

        return export_onnx
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
