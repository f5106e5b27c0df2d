"""Runs that begin with a sparse model: its zeros stay, or somebody says that they will not."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartan
from spartan import NM, Block, Sparsifier

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16), nn.Tanh(), nn.Linear(16, 4))


def sparse(sparsity: float = 0.8, **kwargs: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return spartan.prune(net(), sparsity, **kwargs)


def zeros(model: nn.Module) -> list[Tensor]:
    return [p.detach() == 0 for p in model.parameters() if p.ndim > 1]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 2, 6, 6, generator=g), torch.randint(4, (8,), generator=g)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_zeros_stay_exactly_with_any_optimizer(name: str) -> None:
    model = sparse()
    before, values = zeros(model), [p.detach().clone() for p in model.parameters()]
    optimizer = OPTIMIZERS[name](model.parameters())
    sparsifier = Sparsifier.from_sparse(model).attach(optimizer)
    assert same([p.detach() for p in model.parameters()], values)  # nothing changes before a step
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        assert same(zeros(model), before)
        assert not any(torch.signbit(p[z]).any() for p, z in zip(targets(model), before, strict=True))
    assert not same([p.detach() for p in model.parameters()], values)
    sparsifier.finalize()
    assert same(zeros(model), before)
    assert sparsifier.stats.density == pytest.approx(0.2, abs=1e-3)


def targets(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters() if p.ndim > 1]


def test_it_trains_as_masking_by_hand() -> None:
    mine, theirs = sparse(), sparse()
    masks = [~z for z in zeros(theirs)]
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    Sparsifier.from_sparse(mine).attach(optimizer)
    train(mine, optimizer, range(5))
    other = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for p, mask in zip([p for p in theirs.parameters() if p.ndim > 1], masks, strict=True):
        p.register_hook(lambda g, mask=mask: g * mask)
    train(theirs, other, range(5))
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_finalize_comes_at_any_time_and_a_run_may_go_on_from_there() -> None:
    model = sparse()
    before = zeros(model)
    for _ in range(2):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sparsifier = Sparsifier.from_sparse(model).attach(optimizer)
        train(model, optimizer, range(3))
        told = repr(sparsifier)
        assert "step 3 (finetune): density 19.99" in told
        assert "Fixed(), Unstructured(), budget 'global', 3 tensors" in told
        sparsifier.finalize()
        assert same(zeros(model), before)
    Sparsifier.from_sparse(model).finalize()  # without a step
    with pytest.raises(RuntimeError, match=r"from_sparse\(model\) trains on"):
        train(model, optimizer, range(1))


@pytest.mark.parametrize("stop", [0, 3])
def test_resume_is_bit_identical(stop: int) -> None:
    model = sparse()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsifier = Sparsifier.from_sparse(model).attach(optimizer)
    train(model, optimizer, range(stop))
    file = io.BytesIO()
    torch.save([x.state_dict() for x in (model, optimizer, sparsifier)], file)
    train(model, optimizer, range(stop, 6))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = net()
    again.load_state_dict(saved[0])
    its_optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    its_sparsifier = Sparsifier.from_sparse(again).attach(its_optimizer)
    its_optimizer.load_state_dict(saved[1])
    its_sparsifier.load_state_dict(saved[2])
    assert its_sparsifier.stats.step == stop
    train(again, its_optimizer, range(stop, 6))
    assert same([p.detach() for p in model.parameters()], [p.detach() for p in again.parameters()])


def test_a_kept_weight_that_becomes_zero_is_still_kept() -> None:
    """So that a state loads, although the model has one zero more than when its run began."""
    model = sparse()
    sparsifier = Sparsifier.from_sparse(model)
    weight = model.get_parameter("5.weight")
    place = tuple(weight.nonzero()[0].tolist())
    with sparsifier.dense_weights():
        weight.data[place] = 0.0
    again = net()
    again.load_state_dict(model.state_dict())
    other = Sparsifier.from_sparse(again)
    other.load_state_dict(sparsifier.state_dict())
    assert other.stats.density == sparsifier.stats.density
    assert other.masks()["5.weight"][place]


def test_layers_are_chosen_by_name() -> None:
    model = sparse()
    sparsifier = Sparsifier.from_sparse(model, exclude=["0.*"])
    assert [layer.name for layer in sparsifier.layers()] == ["3.weight", "5.weight"]


@pytest.mark.parametrize(("fill", "words"), [(1.0, "no zeros"), (0.0, "nothing but zeros")])
def test_there_must_be_zeros_and_more(fill: float, words: str) -> None:
    model = nn.Linear(4, 4)
    model.weight.data.fill_(fill)
    with pytest.raises(ValueError, match=rf"from_sparse\(\): the model has {words} in weight"):
        Sparsifier.from_sparse(model)


class TestTheMethod:
    def test_at_least_the_sparsity_must_be_there(self) -> None:
        model = sparse(0.8)
        assert Sparsifier(model, 0.5, 10, "fixed").stats.density == pytest.approx(0.2, abs=1e-3)
        with pytest.raises(ValueError, match=r"method='fixed' keeps the zeros .* 0.8\d* of 0.weight.*\(asked: 0.9\)"):
            Sparsifier(sparse(0.8), 0.9, 10, "fixed")
        with pytest.raises(ValueError, match=r"of 5.weight \(asked: 0.8\)|of 0.weight \(asked: 0.8\)"):
            Sparsifier(sparse(0.8), 0.8, 10, "fixed", budget="uniform")
        Sparsifier(net(), 0.0, 10, "fixed")

    def test_units_must_be_whole(self) -> None:
        options: dict[str, Any] = {"pattern": Block(2, 2)}
        Sparsifier(sparse(0.75, **options), 0.75, 10, "fixed", **options)
        with pytest.raises(ValueError, match=r"pattern=Block.*0.weight has \d+ units that are zero in part. Leave"):
            Sparsifier(sparse(0.75), 0.5, 10, "fixed", **options)

    def test_of_every_m_there_may_be_n(self) -> None:
        options: dict[str, Any] = {"pattern": NM(2, 4), "exclude": ["0.*"]}
        Sparsifier(sparse(0.5, **options), 0.5, 10, "fixed", **options)
        with pytest.raises(ValueError, match=r"4 weights of 3.weight of which 4 are not zero \(asked: 2\)"):
            Sparsifier(sparse(0.5, exclude=["0.*"], budget="uniform"), 0.5, 10, "fixed", **options)


class TestSparseAlready:
    @pytest.mark.parametrize("method", ["static", "set", "rigl", "svite", "probmask"])
    def test_random_masks_are_refused(self, method: str) -> None:
        model = sparse()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        sparsifier = Sparsifier(model, 0.9, 10, method).attach(optimizer)
        with pytest.raises(
            ValueError, match=rf"80.\d% of the weights were zero already.*{method!r}.*load_state_dict.*from_sparse"
        ):
            train(model, optimizer, range(1))
        assert same([p.detach() for p in model.parameters()], before)
        with sparsifier.dense_weights():
            assert same([p.detach() for p in model.parameters()], before)

    @pytest.mark.parametrize("method", ["spartan", "imp", "topkast", "dense"])
    def test_others_say_that_they_begin_anew(self, method: str) -> None:
        model = sparse()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        Sparsifier(model, 0.9, 10, method).attach(optimizer)
        with pytest.warns(
            UserWarning, match=r"80.\d% .*begins anew at step 0.*load_state_dict\(\).*from_sparse\(model\)"
        ):
            train(model, optimizer, range(1))
        train(model, optimizer, range(1, 3))  # once

    def test_a_checkpoint_whose_state_was_forgotten(self) -> None:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        Sparsifier(model, 0.9, 40).attach(optimizer)
        train(model, optimizer, range(15))
        again = net()
        again.load_state_dict(model.state_dict())
        its_optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
        Sparsifier(again, 0.9, 40).attach(its_optimizer)
        with pytest.warns(UserWarning, match="zero already"):
            train(again, its_optimizer, range(1))

    @pytest.mark.parametrize("method", ["spartan", "rigl"])
    def test_a_checkpoint_that_is_resumed_is_none(self, method: str) -> None:
        """Loaded before the sparsifier is built, its state waits with the optimizer's."""
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        Sparsifier(model, 0.9, 40, method).attach(optimizer)
        train(model, optimizer, range(15))
        again = net()
        again.load_state_dict(model.state_dict())
        its_optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
        its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        sparsifier = Sparsifier(again, 0.9, 40, method).attach(its_optimizer)
        assert sparsifier.stats.step == 15
        for each in ((model, optimizer), (again, its_optimizer)):
            train(*each, range(15, 40))
        assert same([p.detach() for p in model.parameters()], [p.detach() for p in again.parameters()])

    def test_few_zeros_and_layers_that_begin_at_zero_are_nothing_to_talk_of(self) -> None:
        model = sparse(0.15)
        nn.init.zeros_(model.get_parameter("5.weight"))
        Sparsifier(model, 0.9, 10, "rigl")
