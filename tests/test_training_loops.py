"""The gradient in a training loop: when it is transformed, accumulated, clipped, assigned, missing, refused."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from spartan import Sparsifier
from tests.training import (
    KEPT,
    METHODS,
    WEIGHTS,
    batch,
    close,
    exactly_sparse,
    gradients_for_w,
    loss_of,
    net,
    same,
    setup,
    train,
    values,
    vjp,
)

pytestmark = pytest.mark.parametrize("method", METHODS)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if name in WEIGHTS and p.grad is not None}


# ---------------------------------------------------------------------- backward()


def test_automatic_and_explicit_backward_agree_bit_for_bit(method: str) -> None:
    automatic, explicit, twice = setup(method), setup(method), setup(method)
    for step in range(20):
        for (model, optimizer, sparsifier), calls in ((automatic, 0), (explicit, 1), (twice, 2)):
            loss_of(model, step).backward()
            for _ in range(calls):
                sparsifier.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert exactly_sparse(sparsifier)
        assert same(values(automatic[0]), values(explicit[0]))
        assert same(values(automatic[0]), values(twice[0]))


def test_backward_is_the_vjp_and_a_second_call_changes_nothing(method: str) -> None:
    model, optimizer, sparsifier = setup(method)
    train(model, optimizer, 6)
    loss = loss_of(model, 6)
    raw = gradients_for_w(model, loss)
    expected = vjp(sparsifier, raw)
    biases = [g for g in raw.values() if g is not None and g.ndim == 1]
    loss.backward()
    close(gradients(model), expected)  # without any call of ours
    once = gradients(model)
    sparsifier.backward()
    assert same(gradients(model), once)
    assert all(
        torch.equal(p.grad, b) for p, b in zip((model[0].bias, model[2].bias, model[4].bias), biases, strict=True)
    )


@pytest.mark.parametrize("clip", ["norm", "value", "reassign"])
def test_clipping_sees_the_gradient_for_theta_and_keeps_it(method: str, clip: str) -> None:
    model, _, sparsifier = setup(method)
    sparsifier.detach()
    optimizer = SGD(model.parameters(), lr=0.1)
    sparsifier.attach(optimizer)
    train(model, optimizer, 5)
    before = {name: w["theta"].clone() for name, w in sparsifier.state_dict()["weights"].items()}
    loss = loss_of(model, 5)
    expected = vjp(sparsifier, gradients_for_w(model, loss))
    loss.backward()
    if clip == "norm":
        targets = [p for name, p in model.named_parameters() if name in WEIGHTS]
        norm = clip_grad_norm_(targets, 0.01)
        by_hand = torch.stack([g.norm() for g in expected.values()]).norm()
        torch.testing.assert_close(norm, by_hand, rtol=1e-10, atol=0)
        expected = {name: g * (0.01 / (by_hand + 1e-6)) for name, g in expected.items()}
    elif clip == "value":
        clip_grad_value_(model.parameters(), 0.01)
        expected = {name: g.clamp(-0.01, 0.01) for name, g in expected.items()}
    else:  # a clipping written by hand, which makes new tensors
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad.clamp(-0.01, 0.01)
        expected = {name: g.clamp(-0.01, 0.01) for name, g in expected.items()}
    try:
        optimizer.step()
    except RuntimeError:
        assert clip == "reassign"  # to refuse it would do too; to transform it a second time would not
        return
    after = {name: w["theta"] for name, w in sparsifier.state_dict()["weights"].items()}
    close(after, {name: before[name] - 0.1 * expected[name] for name in before}, 1e-10)


# ---------------------------------------------------------------------- accumulation and gradients by hand


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulating_micro_batches_equals_one_batch(method: str, set_to_none: bool, explicit: bool) -> None:
    whole, parts = setup(method), setup(method)
    for step in range(20):
        loss_of(whole[0], step).backward()
        whole[1].step()
        whole[1].zero_grad()
        for rows in (slice(0, 4), slice(4, 8)):
            (loss_of(parts[0], step, rows) / 2).backward()
        if explicit:
            parts[2].backward()
        parts[1].step()
        parts[1].zero_grad(set_to_none=set_to_none)
    close(values(parts[0]), values(whole[0]))


@pytest.mark.parametrize("how", ["assigned", "same tensor assigned", "rewritten", "one flat buffer"])
def test_gradients_by_hand(method: str, how: str) -> None:
    plain, (model, optimizer, sparsifier) = setup(method), setup(method)
    params = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in params), dtype=torch.float64)
    buffers = [torch.zeros_like(p) for p in params]
    if how == "one flat buffer":
        for p, view in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = view.view_as(p)
    for step in range(20):
        train(*plain[:2], 1, step)
        if how == "one flat buffer":
            loss_of(model, step).backward()
        else:
            copied = deepcopy(model)
            found = torch.autograd.grad(loss_of(copied, step), list(copied.parameters()))
            for p, buffer, g in zip(params, buffers, found, strict=True):
                if how == "assigned" or p.grad is None:
                    p.grad = g
                elif how == "same tensor assigned":
                    p.grad = buffer.copy_(g)
                else:
                    p.grad.copy_(g)
        optimizer.step()
        flat.zero_()
    assert same(values(model), values(plain[0]))
    assert exactly_sparse(sparsifier)


def test_stepping_twice_on_one_gradient_uses_it_twice(method: str) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.75, 20, method, warmup=0).attach(optimizer)
    before = {name: w["theta"].clone() for name, w in sparsifier.state_dict()["weights"].items()}
    loss = loss_of(model)
    expected = vjp(sparsifier, gradients_for_w(model, loss))
    loss.backward()
    optimizer.step()
    optimizer.step()
    after = {name: w["theta"] for name, w in sparsifier.state_dict()["weights"].items()}
    close(after, {name: before[name] - 0.2 * expected[name] for name in before}, 1e-10)


# ---------------------------------------------------------------------- accumulating onto a transformed gradient


@pytest.mark.parametrize("case", ["after backward", "after clipping", "after a step"])
def test_a_further_backward_adds_to_a_turned_gradient(method: str, case: str) -> None:
    """As torch adds gradients up: each turned by itself, with what was clipped or used before left as it was."""
    model, optimizer, sparsifier = setup(method)
    train(model, optimizer, 2)
    loss_of(model, 2).backward()
    if case == "after a step":
        optimizer.step()
    else:
        sparsifier.backward()
    if case == "after clipping":
        clip_grad_norm_(model.parameters(), 1e-3)
    before, loss = gradients(model), loss_of(model, 3)
    turned = vjp(sparsifier, gradients_for_w(model, loss))
    loss.backward()
    close(gradients(model), {name: before[name] + g for name, g in turned.items()})
    optimizer.step()
    assert exactly_sparse(sparsifier)


def test_what_a_second_loss_does_not_reach_keeps_its_gradient(method: str) -> None:
    """Two backwards of two losses, of which one leaves a branch out: as one backward of their sum."""
    found = []
    for together in (True, False):
        model = Branches()
        optimizer = SGD(model.parameters(), lr=0.1)
        sparsifier = Sparsifier(model, 0.75, 20, method).attach(optimizer)
        train(model, optimizer, 6)
        losses = []
        for step in (6, 7):
            model.skip = step == 7
            losses.append(loss_of(model, step))
        if together:
            sum(losses).backward()  # type: ignore[union-attr]
        else:
            for loss in losses:
                loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        assert exactly_sparse(sparsifier)
    close(found[0], found[1])


def test_a_failed_backward_leaves_nothing_behind(method: str) -> None:
    """It never comes to its end; the batch is dropped, and training goes on as if it had not been."""
    model, optimizer, _ = setup(method)
    twin = setup(method)
    for step in range(12):
        loss_of(model, step).backward()
        if step % 3 == 0:
            with pytest.raises(RuntimeError, match="out of memory"):
                (loss_of(model, 50) + _Failing.apply(model[0].weight).sum()).backward()
            optimizer.zero_grad()
            loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(*twin[:2], 12)
    assert same(values(model), values(twin[0]))


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations(method: str, reentrant: bool) -> None:
    """With reentrant checkpoints a backward has others within it: gradients are turned once, at the end or by the step."""
    plain, (model, optimizer, sparsifier) = setup(method), setup(method)
    for step in range(8):
        train(*plain[:2], 1, step)
        x, y = batch(step)
        hidden = checkpoint(model[:3], x.requires_grad_(), use_reentrant=reentrant)
        (model[3:](hidden) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    close(values(model), values(plain[0]))
    assert exactly_sparse(sparsifier)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_of_gradients(method: str) -> None:
    """With `create_graph` gradients stay those for w, to be differentiated again; the step turns them."""
    model, optimizer, sparsifier = setup(method)
    for step in range(6):
        loss = loss_of(model, step)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.01 * sum(g.square().sum() for g in grads)).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, step).backward(create_graph=True)
        (model[0].weight.grad.square().sum()).backward()
        optimizer.zero_grad()
    assert exactly_sparse(sparsifier)


@pytest.mark.parametrize("case", ["after a step", "no step", "clipped, no step"])
def test_zeroing_in_place_is_enough(method: str, case: str) -> None:
    model, optimizer, sparsifier = setup(method)
    twin = setup(method)
    train(model, optimizer, 3)
    train(*twin[:2], 3)
    loss_of(model, 3).backward()
    if case == "after a step":
        optimizer.step()
        train(*twin[:2], 1, 3)
    else:
        sparsifier.backward()
        if case == "clipped, no step":
            clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, 4).backward()
    optimizer.step()
    train(*twin[:2], 1, 4)
    assert same(values(model), values(twin[0]))


@pytest.mark.parametrize("case", ["before the step", "after the step"])
def test_taking_gradients_without_accumulating_is_allowed(method: str, case: str) -> None:
    """torch.autograd.grad adds nothing to `.grad`."""
    model, optimizer, sparsifier = setup(method)
    twin = setup(method)
    loss_of(model).backward()
    sparsifier.backward()
    if case == "after the step":
        optimizer.step()
    torch.autograd.grad(loss_of(model, 7), list(model.parameters()))
    if case == "before the step":
        optimizer.step()
    train(*twin[:2], 1)
    assert same(values(model), values(twin[0]))


def test_gradients_are_freed_by_zero_grad(method: str) -> None:
    """They must not outlive it: the next forward pass needs the memory."""
    model, optimizer, _ = setup(method)
    for step in (0, 17):
        train(model, optimizer, step)
        loss_of(model, step).backward()
        optimizer.step()
        held = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters()]
        optimizer.zero_grad()
        assert all(storage.expired() for storage in held)


# ---------------------------------------------------------------------- missing gradients and what is a target


class Branches(nn.Module):
    """Two branches, of which one may go unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 4)
        self.double()
        self.skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.a(x).tanh() if self.skip else self.a(x).tanh() + self.b(x).tanh())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_missing_gradients_count_as_zero(method: str, set_to_none: bool) -> None:
    model = Branches()
    optimizer = SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.75, 20, method).attach(optimizer)
    names = ("a.weight", "b.weight", "head.weight")
    for step in range(14):
        model.skip = step % 3 != 0
        loss = loss_of(model, step)
        grads = gradients_for_w(model, loss)
        assert (grads["b.weight"] is None) == model.skip
        loss.backward()
        expected = vjp(sparsifier, grads)
        before = {name: w["theta"].clone() for name, w in sparsifier.state_dict()["weights"].items()}
        optimizer.step()
        after = {name: w["theta"] for name, w in sparsifier.state_dict()["weights"].items()}
        close(after, {name: before[name] - 0.1 * expected[name] for name in names}, 1e-10)
        optimizer.zero_grad(set_to_none=set_to_none)
        assert exactly_sparse(sparsifier)


def test_a_step_without_any_gradient_keeps_theta(method: str) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.75, 20, method, warmup=0).attach(optimizer)
    before = values(model)
    optimizer.step()
    assert sparsifier.stats.step == 1
    masks = sparsifier.masks()
    assert all(torch.equal(masks[name], before[name] != 0) for name in WEIGHTS)


def test_tied_weights_are_one_target(method: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.mix, self.out = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
            self.out.weight = self.embedding.weight
            self.again = self.mix
            self.double()
            self.out.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.again(self.mix(self.embedding(tokens)).tanh()))

    model = Tied()
    optimizer = SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.75, 10, method, include=["mix.weight", "out.weight"]).attach(optimizer)
    assert sorted(sparsifier.masks()) == ["embedding.weight", "mix.weight"]
    tokens = torch.arange(11)
    for _ in range(10):
        nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.out.weight is model.embedding.weight
    sparsifier.finalize()
    assert sum(int((w != 0).sum()) for w in (model.embedding.weight, model.mix.weight)) == int((66 + 36) * 0.25)


def test_frozen_parameters_are_never_targets(method: str) -> None:
    model = net()
    model[2].weight.requires_grad_(False)
    before = model[2].weight.clone()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.warns(UserWarning, match=r"leaves out .* \(frozen"):
        sparsifier = Sparsifier(model, 0.75, 20, method).attach(optimizer)
    train(model, optimizer, 20)
    assert list(sparsifier.masks()) == ["0.weight", "4.weight"]
    assert torch.equal(model[2].weight, before)
    assert sum(layer.kept for layer in sparsifier.layers()) == (KEPT * 4 - 120) // 4
