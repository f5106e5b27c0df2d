"""The course of a run: stats, masks and weights from construction through warm-up and finetuning to finalize()."""

from typing import Any

import pytest
import torch
from torch.optim import SGD

import spartan
from spartan import Sparsifier, Spartan
from tests.training import (
    KEPT,
    METHODS,
    WEIGHTS,
    close,
    exactly_sparse,
    gradients_for_w,
    loss_of,
    net,
    same,
    setup,
    thetas,
    train,
    values,
)

pytestmark = pytest.mark.parametrize("method", METHODS)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: w for name, w in values(model).items() if name in WEIGHTS}


def test_stats_layers_masks_and_repr_at_every_step(method: str) -> None:
    model, optimizer, sparsifier = setup(method)
    for step in range(21):
        stats, layers, masks = sparsifier.stats, sparsifier.layers(), sparsifier.masks()
        density = 1 - 0.75 * min(1.0, step / 4)
        assert stats.step == step
        assert stats.phase == ("warmup" if step < 4 else "intermediate" if step < 16 else "finetune")
        assert stats.target_density == pytest.approx(density, abs=1e-12)
        assert stats.target_cost == pytest.approx(232 * density, abs=1e-9)
        assert stats.density == int(232 * density + 1e-6) / 232
        assert stats.cost == int(232 * density + 1e-6)
        assert stats.beta == (pytest.approx(1 + 9 * min(1.0, step / 16)) if method == "spartan" else None)
        assert [layer.name for layer in layers] == list(WEIGHTS)
        assert [layer.shape for layer in layers] == [(12, 6), (10, 12), (4, 10)]
        assert all(layer.kept == int(masks[layer.name].sum()) for layer in layers)
        assert all(torch.equal(masks[name], w != 0) for name, w in weights(model).items())
        assert f"step {step} of 20 ({stats.phase})" in repr(sparsifier)
        assert all(name in repr(sparsifier) for name in WEIGHTS)
        if step < 20:
            train(model, optimizer, 1, step)
    final = sparsifier.stats, sparsifier.layers(), sparsifier.masks(), repr(sparsifier)
    sparsifier.finalize()
    assert (sparsifier.stats, sparsifier.layers(), repr(sparsifier)) == (final[0], final[1], final[3])
    assert all(torch.equal(sparsifier.masks()[name], final[2][name]) for name in WEIGHTS)


def test_masks_and_weights_change_in_the_step_only(method: str) -> None:
    model, optimizer, sparsifier = setup(method)
    for step in range(20):
        w, masks = values(model), sparsifier.masks()
        model.eval()
        with torch.no_grad():
            loss_of(model, step)
        model.train()
        loss_of(model, step).backward()
        sparsifier.backward()
        _ = sparsifier.stats, sparsifier.layers(), sparsifier.state_dict(), repr(sparsifier)
        assert same(values(model), w)
        assert all(torch.equal(sparsifier.masks()[name], masks[name]) for name in WEIGHTS)
        optimizer.step()
        optimizer.zero_grad()
        assert not same(values(model), w)


def test_masks_returned_are_the_callers_own(method: str) -> None:
    for steps in (6, 17):
        model, optimizer, sparsifier = setup(method)
        train(model, optimizer, steps)
        for mask in sparsifier.masks().values():
            mask.fill_(False)
        assert exactly_sparse(sparsifier)


def test_the_model_is_sparse_from_construction(method: str) -> None:
    model = net()
    dense = weights(model)
    sparsifier = Sparsifier(model, 0.75, 20, method, warmup=0.0)
    assert sparsifier.stats.density == 0.25
    assert exactly_sparse(sparsifier)
    assert same(thetas(sparsifier), dense)


def test_weights_are_theta_times_the_mask(method: str) -> None:
    model, optimizer, sparsifier = setup(method)
    for step in range(16):
        theta, masks, stats = thetas(sparsifier), sparsifier.masks(), sparsifier.stats
        soft = [torch.ones_like(t) for t in theta.values()]
        if stats.beta is not None:
            flat = torch.cat([t.abs().flatten() for t in theta.values()])
            soft = list(spartan.soft_topk(flat, stats.target_cost, stats.beta).split([72, 120, 40]))
        expected = {n: theta[n] * masks[n] * m.view_as(theta[n]) for n, m in zip(WEIGHTS, soft, strict=True)}
        close(weights(model), expected)
        train(model, optimizer, 1, step)


def test_weights_do_not_jump_at_the_freeze(method: str) -> None:
    """A run that finetunes and one that does not hold the same weights when the mask freezes."""
    kind: Any = Spartan(beta=5.0) if method == "spartan" else method
    freezes, goes_on = setup(kind), setup(kind, finetune=0.0)
    train(*freezes[:2], 16)
    train(*goes_on[:2], 16)
    assert (freezes[2].stats.phase, goes_on[2].stats.phase) == ("finetune", "intermediate")
    assert same(values(freezes[0]), values(goes_on[0]))


def test_finetuning_keeps_the_set_and_the_mask(method: str) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.75, 20, method).attach(optimizer)
    train(model, optimizer, 16)
    keep, w = sparsifier.masks(), weights(model)
    with sparsifier.dense_weights():
        theta = weights(model)
    # θ of what is gone is gone; of the rest, w = θ·m
    m = {n: torch.where(keep[n], w[n] / theta[n], 0.0) for n in WEIGHTS}
    assert all(not theta[n][~keep[n]].any() and (m[n][keep[n]] > 0).all() for n in WEIGHTS)
    if method != "spartan":
        assert all(torch.equal(m[n], keep[n].double()) for n in WEIGHTS)
    for step in range(16, 24):  # past total_steps the mask stays
        loss = loss_of(model, step)
        g = {n: x for n, x in gradients_for_w(model, loss).items() if n in WEIGHTS and x is not None}
        loss.backward()
        for name, p in model.named_parameters():
            if name in WEIGHTS:
                assert p.grad is not None
                assert not p.grad[~keep[name]].any()
                torch.testing.assert_close(p.grad, g[name] * m[name], rtol=1e-12, atol=1e-14)
        optimizer.step()
        optimizer.zero_grad()
        theta = {n: theta[n] - 0.1 * g[n] * m[n] for n in WEIGHTS}
        close(weights(model), {n: theta[n] * m[n] for n in WEIGHTS}, 1e-10)
        assert all(torch.equal(sparsifier.masks()[n], keep[n]) for n in WEIGHTS)
        assert exactly_sparse(sparsifier)


def test_finalize_waits_for_the_target_density(method: str) -> None:
    model, optimizer, sparsifier = setup(method)
    for step in range(4):
        before = values(model)
        with pytest.raises(RuntimeError, match=f"step {step} of 20"):
            sparsifier.finalize()
        assert same(values(model), before)
        train(model, optimizer, 1, step)
    sparsifier.finalize()
    assert sum(int((w != 0).sum()) for w in weights(model).values()) == KEPT


def test_after_finalize_the_model_is_free_and_the_step_is_not(method: str) -> None:
    model, optimizer, sparsifier = setup(method)
    train(model, optimizer, 20)
    sparsifier.finalize()
    before = values(model)
    loss_of(model).backward()
    loss_of(model).backward()  # nothing is watched any more
    for call in (optimizer.step, sparsifier.backward, sparsifier.finalize, sparsifier.state_dict):
        with pytest.raises(RuntimeError, match="finalize"):
            call()
    with pytest.raises(RuntimeError, match="finalize"), sparsifier.dense_weights():
        pass
    assert same(values(model), before)
    sparsifier.detach()
    optimizer.step()
    Sparsifier(model, 0.9, 10, method)
