"""2:4 weights trained on a GPU are what torch's semi-structured tensors take."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.sparse import to_sparse_semi_structured

from spartan import NM, Sparsifier
from tests.waiting import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 20


@pytest.mark.filterwarnings("default")  # torch calls these tensors a prototype
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["spartan", "topkast", "imp", "srste"])
def test_trained_weights_convert(method: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).cuda().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sparsifier = Sparsifier(model, 0.5, STEPS, method, pattern=NM(2, 4)).attach(optimizer)
    x = torch.randn(64, 128, device="cuda", dtype=dtype)
    for _ in range(STEPS):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sparsifier.finalize()
    for layer, inputs in ((model[0], x), (model[2], torch.randn(64, 256, device="cuda", dtype=dtype))):
        assert isinstance(layer, nn.Linear)
        assert (layer.weight.detach().view(-1, 4) != 0).sum(1).eq(2).all()
        with torch.no_grad():
            dense = layer(inputs)
            packed = to_sparse_semi_structured(layer.weight.detach())
            assert torch.equal(packed.to_dense(), layer.weight)
            sparse = nn.functional.linear(inputs, packed, layer.bias)
        torch.testing.assert_close(sparse, dense, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "method", ["spartan", "topkast", "imp", "srste", "movement", "static", "acdc", "spartan-learned"]
)
def test_training_agrees_with_the_cpu(method: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 8)).double().to(device)
        x = torch.randn(16, 8, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sparsifier = Sparsifier(model, 0.5, STEPS, method, pattern=NM(2, 4)).attach(optimizer)
        for _ in range(STEPS):
            model(x).sub(1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for mask in sparsifier.masks().values():
            assert (mask.movedim(1, -1).reshape(-1, 4).sum(1) == 2).all()
        found.append([p.detach().cpu() for p in model.parameters()])
    if method != "static":  # devices draw different numbers
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_a_solve_does_not_wait_for_the_device() -> None:
    from spartan.ops import rows

    u = torch.rand(1000, 4, device="cuda")
    rows.solve(u, 2, 10.0)
    with no_waiting():
        rows.solve(u, 2, 10.0)
        rows.top(u, 2)
        rows.below(u, 2)
        rows.pull(u, u)
