"""What is exported computes the same in ONNX Runtime."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import spartan
from spartan.inference.convert import accelerate
from spartan.inference.onnx import export_onnx


def digits_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    ).eval()


def test_the_file_computes_the_same(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    torch.manual_seed(0)
    model = spartan.prune(digits_net(), 0.9)
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    nn.init.normal_(norm.running_mean)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter uses what torch itself has deprecated
        path = export_onnx(model, tmp_path / "made" / "model.onnx", torch.randn(2, 1, 8, 8))
    file = onnx.load(path)
    onnx.checker.check_model(file)
    weights = {w.name: onnx.numpy_helper.to_array(w) for w in file.graph.initializer}
    assert any(w.shape == (10, 128) and (w == 0).mean() > 0.8 for w in weights.values()), "dense, with the zeros"
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for images in (1, 2, 7):
        x = torch.randn(images, 1, 8, 8)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        with torch.no_grad():
            assert torch.allclose(torch.from_numpy(got), model(x), atol=1e-5)


def test_an_accelerated_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    fast = accelerate(spartan.prune(nn.Linear(32, 32), 0.9), kernels="sparse")
    with pytest.raises(ValueError, match="export the model it was made from"):
        export_onnx(fast, tmp_path / "x.onnx", torch.randn(1, 32))
