"""Compiled, exported, wrapped and channels-last models train as plain ones do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import SGD

from spartan import Sparsifier
from tests.training import (
    METHODS,
    WEIGHTS,
    batch,
    close,
    exactly_sparse,
    net,
    same,
    setup,
    train,
    values,
)

each_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Own(nn.Sequential):
    """torch.compile in place skips modules whose forward is torch's own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def fit(model: nn.Module, called: nn.Module, sparsifier: Sparsifier, steps: int = 20) -> None:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    sparsifier.attach(optimizer)
    train(called, optimizer, steps)


@each_method
@pytest.mark.parametrize("built_on", ["original", "compiled", "in place"])
def test_compiled_training_equals_eager(method: str, built_on: str) -> None:
    """Through warm-up, freeze and finetuning: one graph, compiled once."""
    plain = setup(method)
    train(*plain[:2], 20)
    model, counter = Own(*net()), CompileCounterWithBackend("aot_eager")
    compiled: Any = model
    if built_on == "in place":
        model.compile(backend=counter, fullgraph=True)
    else:
        compiled = torch.compile(model, backend=counter, fullgraph=True)
    sparsifier = Sparsifier(compiled if built_on == "compiled" else model, 0.75, 20, method)
    assert list(sparsifier.masks()) == [layer.name for layer in sparsifier.layers()] == list(WEIGHTS)
    fit(model, compiled, sparsifier)
    assert counter.frame_count == 1
    close(values(model), values(plain[0]))
    assert sparsifier.stats.step == 20
    sparsifier.finalize()
    assert torch.equal(compiled(batch()[0]) != 0, model(batch()[0]) != 0)


def test_compiling_a_layer_hides_in_its_name() -> None:
    model = net()
    model[2] = torch.compile(model[2], backend="eager")
    assert list(Sparsifier(model, 0.75, 20).masks()) == list(WEIGHTS)


@each_method
def test_the_compiled_model_sees_new_weights_in_evaluation(method: str) -> None:
    model, optimizer, sparsifier = setup(method)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = batch()[0]
    for step in range(5):
        train(model, optimizer, 1, step)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=1e-12)
    with sparsifier.dense_weights(), torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=1e-12)


@each_method
@pytest.mark.parametrize("steps", [8, 17, 20])
def test_export_gives_the_same_outputs(method: str, steps: int) -> None:
    """In the middle of a run as well as after it."""
    model, optimizer, sparsifier = setup(method)
    train(model, optimizer, steps)
    if steps == 20:
        sparsifier.finalize()
    x = batch()[0]
    program = torch.export.export(model.eval(), (x,))
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-12, atol=1e-12)
    exported = {name: p for name, p in program.named_parameters() if name in WEIGHTS}
    assert all(torch.equal(p != 0, sparsifier.masks()[name]) for name, p in exported.items())
    assert len(exported) == 3


@each_method
def test_data_parallel_names(method: str) -> None:
    plain = setup(method)
    train(*plain[:2], 6)
    model = net()
    wrapped = nn.DataParallel(model)
    sparsifier = Sparsifier(wrapped, 0.75, 20, method, exclude=None, include=WEIGHTS)
    assert list(sparsifier.masks()) == list(sparsifier.state_dict()["weights"]) == list(WEIGHTS)
    optimizer = SGD(wrapped.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    sparsifier.attach(optimizer)
    train(wrapped, optimizer, 6)
    assert same(values(model), values(plain[0]))


def test_a_module_called_module_keeps_its_name() -> None:
    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 4)

    assert list(Sparsifier(Wraps(), 0.5, 10).masks()) == ["module.weight"]


# ---------------------------------------------------------------------- memory formats


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 8, 3, groups=2), nn.Tanh(), *head).double()


def image_loss(model: nn.Module, step: int, memory_format: torch.memory_format) -> Tensor:
    rng = torch.Generator().manual_seed(step)
    x = torch.randn(4, 3, 7, 7, generator=rng, dtype=torch.float64).contiguous(memory_format=memory_format)
    return (model(x) - torch.randn(4, 4, generator=rng, dtype=torch.float64)).square().mean()


@each_method
@pytest.mark.parametrize("tied", [False, True])
def test_channels_last_equals_contiguous(method: str, tied: bool) -> None:
    """But for ties, which are broken in the order of memory: there as many are kept, and not the same."""
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model: Any = conv_net()
        if tied:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_((p * 8).round() / 8 + 0.01)
        model = model.to(memory_format=memory_format)
        strides = [p.stride() for p in model.parameters()]
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        sparsifier = Sparsifier(model, 0.75, 20, method, warmup=0.0 if tied else None).attach(optimizer)
        masks = [sparsifier.masks()]
        for step in range(20):
            image_loss(model, step, memory_format).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert [p.stride() for p in model.parameters()] == strides
            assert exactly_sparse(sparsifier)
            masks.append(sparsifier.masks())
        found.append((values(model), masks))
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert sum(int(mask.sum()) for mask in a.values()) == sum(int(mask.sum()) for mask in b.values())
        assert tied or all(torch.equal(a[name], b[name]) for name in a)
    if not tied:
        close(found[1][0], found[0][0])
