"""A small net, its batches and a training loop, for the tests of training."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import spartan
from spartan import Sparsifier

METHODS = ("spartan", "topkast", "imp")
WEIGHTS = ("0.weight", "2.weight", "4.weight")  # of `net`: 72 + 120 + 40 = 232
SETTINGS: dict[str, Any] = {"sparsity": 0.75, "total_steps": 20}  # warm-up to step 4, finetuning from step 16
KEPT = 58


def net(
    seed: int = 0, dtype: torch.dtype = torch.float64
) -> Any:  # an nn.Sequential, whose layers are easier to name so
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4)).to(dtype)


def batch(step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(100 + step)
    return tuple(torch.randn(8, n, generator=rng, dtype=torch.float64).to(dtype) for n in (6, 4))  # type: ignore[return-value]


def loss_of(model: nn.Module, step: int = 0, rows: slice = slice(None), dtype: torch.dtype = torch.float64) -> Tensor:
    x, y = (t[rows] for t in batch(step, dtype))
    return (model(x) - y).square().mean()


def setup(method: Any = "spartan", **settings: Any) -> tuple[Any, Any, Sparsifier]:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    return model, optimizer, Sparsifier(model, method=method, **SETTINGS | settings).attach(optimizer)


def train(model: nn.Module, optimizer: Optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def thetas(sparsifier: Sparsifier) -> dict[str, Tensor]:
    """θ by name, while masks still change."""
    return {name: w["theta"].clone() for name, w in sparsifier.state_dict()["weights"].items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Bit for bit, the signs of zeros included."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and torch.equal(1 / a[n], 1 / b[n]) for n in a)


def close(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tol: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tol, atol=tol)


def exactly_sparse(sparsifier: Sparsifier) -> bool:
    """Whether the model holds +0.0 wherever a weight is gone, and as many weights as the budget of the moment allows."""
    masks = sparsifier.masks()
    held = {name: p.detach() for name, p in sparsifier.model.named_parameters() if name in masks}
    kept = sum(int(mask.sum()) for mask in masks.values())
    return (
        all(not (w != 0)[~masks[n]].any() and not torch.signbit(w)[w == 0].any() for n, w in held.items())
        and kept == int(sparsifier.stats.target_cost + 1e-6)
        and sum(int((w != 0).sum()) for w in held.values()) == kept
    )


def gradients_for_w(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    """∂L/∂w by name; nothing is accumulated, and the graph stays."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True), strict=True))


def vjp(sparsifier: Sparsifier, grads: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The gradient for θ from that for w, by autograd through the formula of each method; global budget."""
    theta, masks, stats = thetas(sparsifier), sparsifier.masks(), sparsifier.stats
    g = {name: torch.zeros_like(t) if grads[name] is None else grads[name] for name, t in theta.items()}
    if sparsifier.method.name == "topkast":
        return g  # type: ignore[return-value]
    if sparsifier.method.name == "imp":
        return {name: g[name] * masks[name] for name in theta}  # type: ignore[operator]
    leaves = {name: t.requires_grad_() for name, t in theta.items()}
    flat = torch.cat([t.abs().flatten() for t in leaves.values()])
    assert stats.beta is not None
    m = spartan.soft_topk(flat, stats.target_cost, stats.beta).split([t.numel() for t in leaves.values()])
    soft = [t * part.view_as(t) for t, part in zip(leaves.values(), m, strict=True)]
    found = torch.autograd.grad(soft, list(leaves.values()), [g[name] for name in leaves])
    return dict(zip(leaves, found, strict=True))
