"""Inside the optimizer's step: closures, and what is left when something fails there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.optim import LBFGS, SGD, Adam, Optimizer

from spartan import Sparsifier
from spartan.methods.imp import IMP
from tests.training import METHODS, WEIGHTS, close, exactly_sparse, loss_of, net, same, setup, thetas, train, values

each_method = pytest.mark.parametrize("method", METHODS)

# ---------------------------------------------------------------------- closures

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adam": lambda ps: Adam(ps, lr=0.01),
}


@each_method
@pytest.mark.parametrize("maker", MAKERS)
def test_closure_equals_no_closure(method: str, maker: str) -> None:
    model, twin = net(), net()
    optimizer: Any
    optimizer, plain = MAKERS[maker](model.parameters()), MAKERS[maker](twin.parameters())
    sparsifier = Sparsifier(model, 0.75, 20, method).attach(optimizer)
    Sparsifier(twin, 0.75, 20, method).attach(plain)
    for step in range(20):
        asked = int(sparsifier.stats.target_cost + 1e-6)

        def closure(step: int = step, asked: int = asked) -> torch.Tensor:
            assert sum(int((w != 0).sum()) for name, w in model.named_parameters() if name in WEIGHTS) == asked
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        expected = loss_of(model, step)
        assert torch.equal(optimizer.step(closure), expected)
        train(twin, plain, 1, step)
        assert same(values(model), values(twin))
        assert exactly_sparse(sparsifier)


class Looks(SGD):
    """Looks at gradients before it asks for the loss, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [p.grad.clone() for p in self.param_groups[0]["params"]]
        loss = None if closure is None else closure()
        super().step()
        return loss


@each_method
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("start", [0, 6, 17])
def test_gradients_from_before_a_closure_are_turned_too(method: str, by_hand: bool, start: int) -> None:
    """Whether a backward has left them or somebody has written them; once, also where the closure adds to them."""
    seen, left = [], []
    for kind in ("plain", "closure"):
        model = net()
        optimizer = Looks(model.parameters(), lr=0.1)
        Sparsifier(model, 0.75, 20, method).attach(optimizer)
        train(model, optimizer, start)
        raw = torch.autograd.grad(loss_of(model, 30), list(model.parameters()))
        if by_hand:
            for p, grad in zip(model.parameters(), raw, strict=True):
                p.grad = grad.clone()
        else:
            loss_of(model, 30).backward()

        def add(model: Any = model) -> torch.Tensor:
            loss = loss_of(model, 31)
            loss.backward()
            return loss

        if kind == "closure":
            optimizer.step(add)
        else:
            optimizer.step()
        seen.append(optimizer.seen)
        left.append(values(model))
        assert start < 17 or not torch.equal(optimizer.seen[0], raw[0])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    together = net()
    optimizer = Looks(together.parameters(), lr=0.1)
    Sparsifier(together, 0.75, 20, method).attach(optimizer)
    train(together, optimizer, start)
    (loss_of(together, 30) + loss_of(together, 31)).backward()
    optimizer.step()
    close(left[1], values(together))


@each_method
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_evaluates_sparse_weights(method: str, search: str | None) -> None:
    model = net()
    optimizer = LBFGS(model.parameters(), lr=0.2, max_iter=4, line_search_fn=search)
    sparsifier = Sparsifier(model, 0.75, 10, method).attach(optimizer)
    calls = 0
    for step in range(10):
        asked = int(sparsifier.stats.target_cost + 1e-6)

        def closure(asked: int = asked) -> torch.Tensor:
            nonlocal calls
            calls += 1
            assert sum(int((w != 0).sum()) for name, w in model.named_parameters() if name in WEIGHTS) == asked
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        optimizer.step(closure)
        assert sparsifier.stats.step == step + 1
        assert exactly_sparse(sparsifier)
    assert calls > 20


# ---------------------------------------------------------------------- failures inside the step


class Fails(SGD):
    """Raises in the middle of an update, after it has moved half of the parameters."""

    error: type[BaseException] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.error is not None:
            with torch.no_grad():
                for p in self.param_groups[0]["params"][:3]:
                    p.add_(1.0)
            raise self.error("midway")
        return super().step(closure)


@each_method
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("start", [2, 8, 17])
def test_an_error_in_the_update_leaves_the_old_weights(method: str, error: type[BaseException], start: int) -> None:
    model, twin = net(), setup(method)
    optimizer = Fails(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    sparsifier = Sparsifier(model, 0.75, 20, method).attach(optimizer)
    train(model, optimizer, start)
    train(*twin[:2], start)
    before, stats = values(model), sparsifier.stats
    optimizer.error = error
    loss_of(model, start).backward()
    with pytest.raises(error, match="midway"):
        optimizer.step()
    optimizer.error = None
    assert same({n: values(model)[n] for n in WEIGHTS}, {n: before[n] for n in WEIGHTS})
    assert sparsifier.stats == stats
    with torch.no_grad():
        model[0].bias.copy_(before["0.bias"])  # no target: what the failed step did to it is the user's to mend
    optimizer.step()  # the same gradient again
    optimizer.zero_grad()
    train(*twin[:2], 1, start)
    assert same(values(model), values(twin[0]))


@each_method
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["sgd", "lbfgs"])
@pytest.mark.parametrize("start", [2, 8, 17])
def test_an_error_in_a_closure_leaves_the_old_weights(
    method: str, kind: str, error: type[BaseException], start: int
) -> None:
    model = net()
    lbfgs = kind == "lbfgs"
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=5) if lbfgs else SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.75, 20, method).attach(optimizer)
    fail_at, calls = -1, 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        if calls == fail_at:
            raise error("in the closure")
        return loss

    for _ in range(start):
        optimizer.step(closure)
    before, stats, theta = values(model), sparsifier.stats, thetas(sparsifier)
    fail_at = calls + (3 if lbfgs else 1)
    with pytest.raises(error, match="in the closure"):
        optimizer.step(closure)
    assert calls == fail_at
    assert same({n: values(model)[n] for n in WEIGHTS}, {n: before[n] for n in WEIGHTS})
    assert sparsifier.stats == stats
    assert same(thetas(sparsifier), theta)
    optimizer.zero_grad()
    optimizer.step(closure)
    assert sparsifier.stats.step == start + 1
    assert exactly_sparse(sparsifier)


@dataclass(frozen=True)
class Interrupted(IMP):
    """IMP that is interrupted once while it chooses masks."""

    def choose(self, solver: Any, at: Any) -> None:
        if solver.state.numbers.pop("interrupt", None):
            raise KeyboardInterrupt
        super().choose(solver, at)


def test_an_interrupt_while_masks_are_chosen_leaves_sparse_weights() -> None:
    model, optimizer, sparsifier = setup(Interrupted())
    train(model, optimizer, 6)
    sparsifier._run.weights.solving[0].state.numbers["interrupt"] = 1
    loss_of(model, 6).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    # θ has moved and the masks have not, so that the budget is only about met
    assert sum(int((w != 0).sum()) for name, w in model.named_parameters() if name in WEIGHTS) < 100
    optimizer.zero_grad()
    train(model, optimizer, 1, 7)
    assert exactly_sparse(sparsifier)


@each_method
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_raises_with_its_name_and_changes_nothing(method: str, value: float) -> None:
    model, optimizer, sparsifier = setup(method)
    train(model, optimizer, 6)
    before, step = values(model), sparsifier.stats.step
    loss_of(model, 6).backward()
    assert model[2].weight.grad is not None
    kept = sparsifier.masks()["2.weight"].nonzero()[0].tolist()
    model[2].weight.grad[kept[0], kept[1]] = value
    sparsifier.backward()
    with pytest.raises(RuntimeError, match=r"[024]\.weight"):
        optimizer.step()
    assert same(values(model), before)
    assert sparsifier.stats.step == step
    optimizer.zero_grad()
    train(model, optimizer, 1, 6)
    assert exactly_sparse(sparsifier)
