"""An average of θ: what it is, how sparse it is when used, and that it disturbs nothing."""

import io

import pytest
import torch
from torch import nn
from torch.optim import SGD

from spartan import Sparsifier, verify
from tests.training import SETTINGS, WEIGHTS, close, net, same, setup, thetas, train, values

METHODS = ["spartan", "topkast", "rigl", "movement", "fixed"]


def start(method: str) -> tuple[nn.Module, SGD, Sparsifier]:
    model = net()
    if method == "fixed":
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 2:
                    p[torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) < 0.8] = 0.0
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, Sparsifier(model, method=method, **SETTINGS).attach(optimizer)


@pytest.mark.parametrize("steps", [3, 10, 18])
@pytest.mark.parametrize("method", METHODS)
def test_it_is_as_sparse_as_the_model_and_disturbs_nothing(method: str, steps: int) -> None:
    model, optimizer, sparsifier = start(method)
    twin = start(method)
    average = sparsifier.ema(0.8)
    train(model, optimizer, steps)
    train(*twin[:2], steps)
    before, kept = values(model), sum(layer.kept for layer in sparsifier.layers())
    with average.applied() as inside:
        assert inside is model
        held = values(model)
        assert sum(int((held[n] != 0).sum()) for n in WEIGHTS) <= kept
        assert not same(held, before)
        copied = average  # evaluated, saved or exported here
    assert same(values(copied.model()), held)
    assert same(values(model), before)
    train(model, optimizer, 2, steps)
    train(*twin[:2], 2, steps)
    assert same(values(model), values(twin[0]))


def test_it_is_the_average_of_theta_and_of_the_rest() -> None:
    model, optimizer, sparsifier = setup("topkast")
    average = sparsifier.ema(0.8)
    expected = thetas(sparsifier) | {n: p.detach().clone() for n, p in model.named_parameters() if n not in WEIGHTS}
    for step in range(12):
        train(model, optimizer, 1, step)
        now = thetas(sparsifier) | {n: p.detach() for n, p in model.named_parameters() if n not in WEIGHTS}
        expected = {n: torch.lerp(x, now[n], 0.2) for n, x in expected.items()}
    state = average.state_dict()
    close(state["theta"] | state["others"], expected)
    held = values(average.model())
    rank = torch.cat([expected[n].abs().flatten() for n in WEIGHTS])
    least = rank.topk(58).values[-1]
    close(
        {n: held[n] for n in WEIGHTS}, {n: torch.where(expected[n].abs() >= least, expected[n], 0.0) for n in WEIGHTS}
    )
    verify(average.model(), 0.75)


def test_it_resumes_bit_for_bit() -> None:
    model, optimizer, sparsifier = setup("spartan")
    average = sparsifier.ema(0.9)
    train(model, optimizer, 9)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), average.state_dict()], file)
    train(model, optimizer, 11, 9)
    file.seek(0)
    weights, momenta, state = torch.load(file, weights_only=True)
    again, its_optimizer, its_sparsifier = setup("spartan")
    its_average = its_sparsifier.ema(0.9)
    again.load_state_dict(weights)
    its_optimizer.load_state_dict(momenta)
    its_average.load_state_dict(state)
    train(again, its_optimizer, 11, 9)
    assert same(values(average.model()), values(its_average.model()))


def test_mistakes() -> None:
    model, optimizer, sparsifier = setup("imp")
    with pytest.raises(ValueError, match=r"decay=1\.0"):
        sparsifier.ema(1.0)
    average = sparsifier.ema(0.5)
    with pytest.raises(ValueError, match="another model"):
        average.load_state_dict({"steps": 0, "theta": {}, "others": {}})
    train(model, optimizer, 20)
    with average.applied(), pytest.raises(RuntimeError, match="leave the block"):
        optimizer.step()
    sparsifier.finalize()
    with pytest.raises(RuntimeError, match="before"):
        average.model()
