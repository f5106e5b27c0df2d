"""Exports models to ONNX: dense tensors with the zeros in them, for ONNX Runtime and whatever else reads the format."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spartan.inference.runtime import InferenceLayer, arguments_of


def export_onnx(
    model: nn.Module,
    path: str | Path,
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    dynamic_batch: bool = True,
) -> Path:
    """Write the model as an ONNX file; weights are dense tensors. Needs `pip install 'spartan-sparsity[onnx]'`.

    Args:
        model: an ordinary (sparse) model, not an accelerated one.
        path: of the file to write; weights over 2 GB go to a file beside it.
        example_inputs: one call's inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        dynamic_batch: let the first dimension of every tensor among the inputs vary.
    """
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"export_onnx needs {' and '.join(missing)}: pip install 'spartan-sparsity[onnx]'")
    if any(isinstance(module, InferenceLayer) for module in model.modules()):
        raise ValueError(
            "model is an accelerated one, whose kernels ONNX does not know; export the model it was made from"
        )
    args, kwargs = arguments_of(example_inputs)
    # One name for all: inputs of one call share their batch.
    batch = {0: torch.export.Dim.DYNAMIC}
    each = [batch if isinstance(x, Tensor) and x.dim() else None for x in (*args, *kwargs.values())]
    shapes: Any = dict(zip(kwargs, each, strict=True)) if kwargs else tuple(each)
    training, target = model.training, Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with torch.no_grad():
            options: dict[str, Any] = {"kwargs": kwargs or None, "dynamic_shapes": shapes if dynamic_batch else None}
            program = torch.onnx.export(model.eval(), args, dynamo=True, verbose=False, **options)
    finally:
        model.train(training)
    assert program is not None
    program.save(str(target))
    return target
