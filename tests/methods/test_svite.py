"""SViTE follows the rules of Chen et al. (2021), for weights and for whole heads."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import Block, Sparsifier, Unstructured
from spartan.methods import SViTE  # type: ignore[attr-defined]
from spartan.problem.patterns.heads import Heads
from spartan.problem.schedules import Moment
from tests.contract.cases import Net, batch
from tests.methods.rewiring import DECAY, LR, MOMENTUM, NAMES, Rule, T, compare

HEADS, WIDTH, TOKENS, END = 4, 8, 5, 32
ROWS = WIDTH // HEADS


def rounded_up(t: int, kept: int) -> int:
    return math.ceil((0.005 + 0.5 * (0.5 - 0.005) * (1 + math.cos(math.pi * t / T))) * kept)


# Not blocks with a uniform budget: the head's gradients sum to zero over the classes, so that its two rows of blocks tie.
@pytest.mark.parametrize(("budget", "side"), [("erk", 1), ("erk", 2), ("uniform", 1)])
def test_forty_steps(budget: str, side: int) -> None:
    pattern = Unstructured() if side == 1 else Block(2, 2)
    seen = compare(
        lambda model: Sparsifier(model, 0.7, T, SViTE(every=4), pattern=pattern, budget=budget, finetune=0.25),
        Rule(lambda t: (t + 1) % 4 == 0 and t + 1 < 30, lambda t, kept: rounded_up(t + 1, kept), dense=True),
        lambda seed: lambda layer, step, gradient: gradient,
        side,
        end=30,
    )
    changed = [any(not torch.equal(a[n] != 0, b[n] != 0) for n in NAMES) for a, b in pairwise(seen)]
    assert changed[3]
    assert not any(changed[31:])


class Attention(nn.Module):
    """Two layers of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.two = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            x = x + layer(x, x, x, need_weights=False)[0]
        return self.head(x.mean(1))


def tokens(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(6, TOKENS, WIDTH, dtype=torch.float64, generator=g), torch.randint(3, (6,), generator=g)


def rows_of(head: int, which: str = "qkv") -> list[int]:
    return [part * WIDTH + head * ROWS + r for part, name in enumerate("qkv") if name in which for r in range(ROWS)]


def reference(model: nn.Module, alive: dict[str, list[int]], every: int) -> list[dict[str, Tensor]]:
    """w at every step, head by head."""
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    momentum = {n: torch.zeros_like(p) for n, p in theta.items()}
    history = []
    for t in range(T + 1):
        mask = {n: torch.zeros_like(theta[n]) for n in alive}
        for n, heads in alive.items():
            for h in heads:
                mask[n][rows_of(h)] = 1.0
        w = {n: p * mask[n] if n in mask else p for n, p in theta.items()}
        history.append({n: w[n].clone() for n in alive})
        leaves = {n: p.detach().requires_grad_() for n, p in w.items()}
        x, y = tokens(t)
        loss = nn.functional.cross_entropy(functional_call(model, leaves, (x,)), y)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        for n in theta:
            momentum[n] = MOMENTUM * momentum[n] + grads[n] + DECAY * theta[n]  # of pruned weights too
            theta[n] = theta[n] - LR * momentum[n]
        if (t + 1) % every or t + 1 >= END:
            continue
        for n, heads in alive.items():
            importance = {h: abs(float((w[n] * grads[n])[rows_of(h, "v")].sum())) for h in range(HEADS)}
            growth = {h: float(grads[n][rows_of(h, "v")].abs().sum()) for h in range(HEADS)}
            count = rounded_up(t + 1, len(heads))
            gone = sorted(heads, key=lambda h: importance[h])[:count]
            free = [h for h in range(HEADS) if h not in heads or h in gone]
            grown = sorted(free, key=lambda h: -growth[h])[:count]
            for h in grown:
                if h not in heads:
                    theta[n][rows_of(h, "v")] = 0.0
                    momentum[n][rows_of(h)] = 0.0
            alive[n] = sorted((set(heads) - set(gone)) | set(grown))
    return history


def test_forty_steps_of_heads() -> None:
    torch.manual_seed(0)
    model = Attention().double()
    straight = copy.deepcopy(model)
    method = SViTE(every=3)
    sparsifier = Sparsifier(model, 0.5, T, method, pattern=Heads(HEADS), include="*in_proj_weight")
    assert sparsifier._run.at.freeze_step == END
    first = {n: [h for h in range(HEADS) if mask[rows_of(h)].all()] for n, mask in sparsifier.masks().items()}
    assert [len(heads) for heads in first.values()] == [2, 2]
    expected = reference(straight, dict(first), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    sparsifier.attach(optimizer)
    sets = []
    for t in range(T + 1):
        masks = sparsifier.masks()
        for n, w in expected[t].items():
            torch.testing.assert_close(model.get_parameter(n).detach(), w, rtol=0, atol=1e-10, msg=f"step {t}, {n}")
            assert not model.get_parameter(n)[~masks[n]].any()
            assert int(masks[n].sum()) == 2 * 3 * ROWS * WIDTH
        sets.append([tuple(masks[n].all(1).tolist()) for n in masks])
        x, y = tokens(t)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len({str(s) for s in sets}) > 2, "heads come and go"
    sparsifier.finalize()


def test_a_head_without_rows_is_a_constant_that_the_output_bias_takes() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    nn.init.normal_(model.in_proj_bias)
    Sparsifier(model, 0.5, 10, SViTE(), pattern=Heads(HEADS), include="in_proj_weight")
    alive = [h for h in range(HEADS) if model.in_proj_weight[rows_of(h)].any()]
    assert len(alive) == 2
    x, _ = tokens(0)
    whole = model(x, x, x, need_weights=False)[0]
    columns = [h * ROWS + r for h in alive for r in range(ROWS)]
    others = [c for c in range(WIDTH) if c not in columns]
    rows = [part * WIDTH + c for part in range(3) for c in columns]
    q, k, v = (
        (x @ model.in_proj_weight[rows].T + model.in_proj_bias[rows]).unflatten(2, (3, 2, ROWS)).permute(2, 0, 3, 1, 4)
    )
    out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    weight = model.out_proj.weight
    bias = model.out_proj.bias + weight[:, others] @ model.in_proj_bias[2 * WIDTH :][others]
    torch.testing.assert_close(out @ weight[:, columns].T + bias, whole)


def test_the_score_of_a_head_is_that_of_its_output() -> None:
    """|Σ A·∂L/∂A|, with A the attention's output per head before the projection; no bias."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True).double()
    sparsifier = Sparsifier(model, 0.25, 10, SViTE(every=1), pattern=Heads(HEADS), include="in_proj_weight")
    x, _ = tokens(0)
    qkv = (x @ model.in_proj_weight.T).unflatten(2, (3, HEADS, ROWS)).permute(2, 0, 3, 1, 4)
    out = nn.functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)
    out.retain_grad()
    (out @ model.out_proj.weight.T).square().sum().backward()
    assert out.grad is not None
    want = (out * out.grad).unflatten(2, (HEADS, ROWS)).sum((0, 1, 3)).abs()
    sparsifier.backward()
    taylor = sparsifier._run.weights.solving[0].state.per_unit["taylor"]
    torch.testing.assert_close(taylor * (3 * ROWS * WIDTH), want.detach())


def test_adams_moments_of_pruned_weights_go_on_and_are_theirs_when_they_grow() -> None:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sparsifier = Sparsifier(model, 0.7, T, SViTE(every=4)).attach(optimizer)
    mean = {n: torch.zeros_like(model.get_parameter(n)) for n in NAMES}
    for t in range(12):
        old = sparsifier.masks()
        x, y = batch(t)
        w = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
        loss = nn.functional.cross_entropy(functional_call(copy.deepcopy(model), w, (x,)), y)
        for n, g in zip(NAMES, torch.autograd.grad(loss, [w[n] for n in NAMES]), strict=True):
            mean[n] = 0.9 * mean[n] + 0.1 * g
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for n in NAMES:
            parameter, grown = model.get_parameter(n), sparsifier.masks()[n] & ~old[n]
            torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], mean[n])
            assert not parameter[grown].any()


@pytest.mark.parametrize("importance", [None, "magnitude", "taylor"])
def test_timm_vit(importance: str | None) -> None:
    pytest.importorskip("tests.torchvision_cpu")
    torch.manual_seed(0)
    vit = pytest.importorskip("timm").create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=4
    )
    optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-4)
    method = SViTE(every=2, importance=importance)
    sparsifier = Sparsifier(vit, 0.3, 20, method, pattern=Heads(3), include="*.qkv.weight").attach(optimizer)
    seen = set()
    for _ in range(20):
        for layer in sparsifier.layers():
            assert layer.kept == 2 * 3 * 64 * 192  # two heads of three
        assert sparsifier.progress()["density"] == pytest.approx(2 / 3)
        seen.add(str([mask.all(1)[:192:64].tolist() for mask in sparsifier.masks().values()]))
        nn.functional.cross_entropy(vit(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) > 1
    sparsifier.finalize()
    for block in vit.blocks:
        heads = block.attn.qkv.weight.reshape(3, 3, 64, 192).abs().sum((0, 2, 3))
        assert int((heads > 0).sum()) == 2


def test_torchvision_vit() -> None:
    from tests.torchvision_cpu import torchvision

    vit = torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=4, hidden_dim=16, mlp_dim=32, num_classes=3
    )
    optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-3)
    sparsifier = Sparsifier(vit, 0.25, 10, "svite", pattern=Heads(4), include="*in_proj_weight").attach(optimizer)
    for _ in range(10):
        nn.functional.cross_entropy(vit(torch.randn(3, 3, 16, 16)), torch.arange(3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sparsifier.finalize()
    assert [layer.kept for layer in sparsifier.layers()] == [3 * 3 * 4 * 16] * 2


def test_the_mask_is_updated_every_hundredth_of_the_run_until_four_fifths() -> None:
    at = Moment.start(1000, SViTE.warmup, SViTE.finetune, 0)
    assert [t + 1 for t in range(1001) if SViTE().updates_at(replace(at, step=t))] == list(range(10, 800, 10))
    assert SViTE().period(Moment.start(30, 0.0, 0.2, 0)) == 1


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: SViTE(every=0), "SViTE: every=0"),
        (lambda: SViTE(fraction=1.5), "SViTE: fraction=1.5"),
        (lambda: SViTE(importance="size"), "SViTE: importance='size'"),
        (lambda: Heads(0), "Heads: count=0"),
        (lambda: Sparsifier(nn.Linear(8, 8), 0.5, 10, "svite", pattern=Heads(4)), "3·4·d rows.*exclude"),
    ],
)
def test_bad_settings_are_named(build: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build()
