"""Every mistake gets its own clear error, and changes nothing."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import spartan
from spartan import Block, Flops, Sparsifier, Spartan, TopKAST, constant, linear
from tests.contract.cases import Net, backward


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"sparsity": 1.0}, r"sparsity=1.0 is outside \[0, 1\)"),
        ({"sparsity": -0.1}, r"sparsity=-0.1 is outside"),
        ({"sparsity": 95}, r"sparsity=95 is outside"),
        ({"sparsity": math.nan}, r"sparsity=nan is outside"),
        ({"total_steps": 0}, "total_steps=0"),
        ({"total_steps": -3}, "total_steps=-3"),
        ({"total_steps": 10.5}, "total_steps=10.5"),
        (
            {"method": "spartann"},
            r"method='spartann' is unknown \(did you mean spartan\?\); accepted: .*spartan.*Method",
        ),
        ({"method": 3}, "method=3 is unknown"),
        ({"pattern": "block"}, "pattern='block' is not a pattern"),
        (
            {"pattern": Block(3, 3)},
            r"does not divide 4×18 \(shape \(4, 2, 3, 3\)\) of conv.weight.*exclude=\['conv.weight'\]",
        ),
        ({"cost": 3.0}, "cost=3.0 is not a cost"),
        ({"cost": {"*": 0.0}}, "costs must be positive"),
        ({"cost": {"*": -1.0}}, "costs must be positive"),
        ({"cost": {"*": math.inf}}, "costs must be positive and finite"),
        ({"cost": {"nothing.*": 1.0, "*": 1.0}}, "'nothing.*' matches no target"),
        ({"cost": {"conv.*": 1.0}}, "matches hidden.weight"),
        ({"budget": "erkk"}, "budget='erkk' is unknown"),
        ({"budget": {"nothing.*": 0.5}}, "'nothing.*' matches no target"),
        ({"budget": {"conv.*": 1.5}}, r"budget\['conv.\*'\]=1.5 is outside"),
        ({"include": "nothing.*"}, "include='nothing.*' matches no parameter"),
        ({"exclude": ["nothing.*"]}, "exclude='nothing.*' matches no parameter"),
        ({"exclude": "*"}, "no layer to sparsify"),
        ({"include": "conv.bias"}, "include='conv.bias' has 1 dimension"),
        ({"include": [3]}, "include holds 3"),
        ({"warmup": -0.1}, "warmup=-0.1"),
        ({"finetune": 1.5}, "finetune=1.5"),
        ({"warmup": 0.7, "finetune": 0.7}, "together exceed"),
        ({"count": "all"}, "count='all' is unknown"),
        ({"count": "model", "sparsity": 0.99}, 'count="model".*must stay under'),
        ({"count": "model", "cost": {"*": 2.0}}, 'count="model" counts parameters'),
        ({"method": TopKAST(backward_sparsity=0.95)}, "backward_sparsity=0.95 exceeds the sparsity 0.9"),
        ({"cost": Flops(torch.zeros(1, 3, 6, 6).double())}, "channels"),
    ],
)
def test_bad_arguments_change_nothing(kwargs: dict[str, Any], message: str) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    arguments: dict[str, Any] = {"sparsity": 0.9, "total_steps": 10} | kwargs
    with pytest.raises((ValueError, RuntimeError), match=message):
        Sparsifier(model, **arguments)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(not p._backward_hooks for p in model.parameters())
    Sparsifier(model, 0.9, 10)  # and the model is free for another


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Spartan(beta=-1.0), "beta=-1.0"),
        (lambda: Spartan(beta=linear(1, -5)), "must be at least 0"),
        (lambda: Spartan(beta=math.nan), "NaN"),
        (lambda: linear(1, math.nan), "NaN"),
        (lambda: linear(1, math.inf), "cannot run from 1.0 to inf"),
        (lambda: Spartan(solver="bisection"), "solver='bisection' is unknown"),
        (lambda: Spartan(init="cold"), "init='cold' with solver='newton'"),
        (lambda: Spartan(solver="sinkhorn", init="warm"), "init='warm'"),
        (lambda: TopKAST(backward_sparsity=1.0), "backward_sparsity=1.0 is outside"),
        (lambda: Block(0, 4), "h=0"),
        (lambda: Block(4, -2), "w=-2"),
        (lambda: Flops(None, value_power=math.nan), "value_power=nan"),
        (lambda: Sparsifier(3, 0.9, 10), "not a torch.nn.Module"),  # type: ignore[arg-type]
        (lambda: Sparsifier(nn.Sequential(nn.ReLU()), 0.9, 10), "no layer to sparsify"),
        (lambda: spartan.prune(nn.Linear(4, 4), 1.5), "sparsity=1.5"),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_at_the_start(bad: float) -> None:
    model = net()
    with torch.no_grad():
        model.get_parameter("hidden.weight")[1, 2] = bad
    with pytest.raises(ValueError, match="hidden.weight holds NaN or infinite weights"):
        Sparsifier(model, 0.9, 10)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", ["spartan", "topkast", "imp"])
def test_non_finite_gradients(bad: float, method: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsifier = Sparsifier(model, 0.9, 10, method, warmup=0.0).attach(optimizer)
    backward(model, 0)
    keep = sparsifier.masks()["head.weight"]
    grad = model.get_parameter("head.weight").grad
    assert grad is not None
    grad[tuple(keep.nonzero()[0])] = bad
    before = copy.deepcopy(model.state_dict())
    theta = copy.deepcopy(sparsifier.state_dict())
    sparsifier.backward()  # never raises
    with pytest.raises(
        RuntimeError, match="the gradient of .* holds NaN or infinite values at step 0; nothing was updated"
    ):
        optimizer.step()
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(
        torch.equal(m["theta"], theta["weights"][n]["theta"]) for n, m in sparsifier.state_dict()["weights"].items()
    )
    assert not optimizer.state
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()
    assert sparsifier.stats.step == 1


def test_an_update_that_explodes_is_taken_back() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e308)
    sparsifier = Sparsifier(model, 0.9, 10, warmup=0.0).attach(optimizer)
    before = copy.deepcopy({n: p for n, p in model.named_parameters() if p.ndim > 1})
    backward(model, 0)
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(1e10)
    with pytest.raises(
        RuntimeError, match="would hold NaN or infinite weights after step 0; the update was taken back"
    ):
        optimizer.step()
    assert all(torch.equal(model.get_parameter(n), p) for n, p in before.items())
    assert sparsifier.stats.step == 0


class ScheduleFree(torch.optim.SGD):
    """The shape of a schedule-free optimizer: it must be told when to train and when to evaluate."""

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False


def test_optimizers_that_cannot_work() -> None:
    model = net()
    sparsifier = Sparsifier(model, 0.9, 10)
    with pytest.raises(ValueError, match="needs the optimizer"):
        sparsifier.attach()
    with pytest.raises(
        ValueError, match="no optimizer given to attach.. trains conv.weight, hidden.weight, head.weight"
    ):
        sparsifier.attach(torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="trains hidden.weight, head.weight"):
        sparsifier.attach(torch.optim.SGD(model.get_submodule("conv").parameters(), lr=0.1))
    with pytest.raises(ValueError, match="ScheduleFree is schedule-free"):
        sparsifier.attach(ScheduleFree(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="more than one optimizer"):
        sparsifier.attach(torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match="not a torch optimizer"):
        sparsifier.attach("adam")  # type: ignore[arg-type]
    good = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "step" not in good.__dict__
    sparsifier.attach(good)
    with pytest.raises(RuntimeError, match="attached already"):
        sparsifier.attach(good)


def test_two_sparsifiers_on_one_model() -> None:
    model = net()
    first = Sparsifier(model, 0.9, 10, warmup=0.0)
    with pytest.raises(RuntimeError, match="conv.weight already belongs to a sparsifier"):
        Sparsifier(model, 0.5, 10)
    first.finalize()
    Sparsifier(model, 0.95, 10)


@pytest.mark.parametrize("move", [lambda m: m.float(), lambda m: m.to("meta")])
def test_moving_the_model_afterwards(move: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.9, 10).attach(optimizer)
    move(model)
    with pytest.raises(RuntimeError, match=r"conv.weight was moved, cast or replaced.*Build the sparsifier after"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="was moved, cast or replaced"):
        sparsifier.backward()


def test_weights_replaced_by_assignment() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Sparsifier(model, 0.9, 10).attach(optimizer)
    model.load_state_dict(net().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="was moved, cast or replaced"):
        optimizer.step()


def test_a_step_after_finalize() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.9, 10, warmup=0.0).attach(optimizer)
    sparsifier.finalize()
    before = copy.deepcopy(model.state_dict())
    for call in (optimizer.step, sparsifier.backward, sparsifier.finalize, sparsifier.state_dict):
        with pytest.raises(RuntimeError, match=r"after finalize\(\)"):
            call()
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert sparsifier.stats.density == pytest.approx(0.1, abs=0.01)
    sparsifier.detach()
    optimizer.step()


def test_finalize_too_early() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.9, 10, Spartan(project=False)).attach(optimizer)
    with pytest.raises(RuntimeError, match="finalize.. at step 0 of 10: spartan reaches the target density at step 8"):
        sparsifier.finalize()
    with pytest.raises(RuntimeError, match="reaches the target density at step 2"):
        Sparsifier(net(), 0.9, 10, "spartan").finalize()


class TestLoading:
    def test_the_state_of_another_model(self) -> None:
        other = Sparsifier(nn.Sequential(nn.Linear(4, 4)), 0.9, 10).state_dict()
        with pytest.raises(ValueError, match=r"another model: it lacks conv.weight, .*the model lacks, 0.weight"):
            Sparsifier(net(), 0.9, 10).load_state_dict(other)

    def test_another_shape_or_type(self) -> None:
        with pytest.raises(ValueError, match=r"weight as \(4, 4\); the model has \(8, 4\)"):
            Sparsifier(nn.Linear(4, 8), 0.9, 10).load_state_dict(Sparsifier(nn.Linear(4, 4), 0.9, 10).state_dict())
        with pytest.raises(ValueError, match="as torch.float64; the model has torch.float32"):
            Sparsifier(nn.Linear(4, 4), 0.9, 10).load_state_dict(
                Sparsifier(nn.Linear(4, 4).double(), 0.9, 10).state_dict()
            )

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"sparsity": 0.8}, "sparsity=0.9; this sparsifier has sparsity=0.8"),
            ({"total_steps": 20}, "total_steps=10; this sparsifier has total_steps=20"),
            ({"method": "imp"}, "saved with method=.Paced"),
            ({"pattern": Block(2, 2)}, "pattern='Unstructured"),
            ({"budget": "uniform"}, "budget='global'"),
            ({"cost": {"*": 2.0}}, "cost='Params'"),
            ({"method": Spartan(beta=constant(3))}, "constant"),
        ],
    )
    def test_other_settings(self, kwargs: dict[str, Any], message: str) -> None:
        state = Sparsifier(net(), 0.9, 10).state_dict()
        model = net()
        sparsifier = Sparsifier(model, **({"sparsity": 0.9, "total_steps": 10} | kwargs))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=message):
            sparsifier.load_state_dict(state)
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())

    @pytest.mark.parametrize("state", [{}, {"weights": {}}, None, net().state_dict()])
    def test_something_else(self, state: Any) -> None:
        with pytest.raises(ValueError, match="not the state of a sparsifier"):
            Sparsifier(net(), 0.9, 10).load_state_dict(state)

    def test_the_model_without_the_sparsifier(self) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Sparsifier(model, 0.9, 10).attach(optimizer)
        torch.manual_seed(5)
        model.load_state_dict(Net().double().state_dict())
        with pytest.raises(RuntimeError, match=r"conv.weight was changed outside the optimizer step.*load_state_dict"):
            optimizer.step()
