"""Figure 1: the soft top-k mask over β, and why a small step near the threshold is a large one after projection."""

from typing import Any

import torch
from torch import Tensor

from spartan import hard_topk, soft_topk
from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.figures import ink, new_figure
from spartan.app.paper.results import Results
from spartan.app.paper.tables import Table

BETAS = (0.0, 2.0, 5.0, 20.0, float("inf"))
DENSITY = 0.3
# Panel (c): steps of equal length in the plane, k = 1; one across the diagonal, one beside an axis.
STEPS = {"far from sparse": ((0.86, 0.80), (0.80, 0.86)), "nearly sparse": ((0.95, 0.14), (1.01, 0.08))}


def weights() -> Tensor:
    """400 weights, evenly spread over [−2, 2]."""
    return torch.linspace(-2, 2, 400, dtype=torch.float64)


def masks() -> dict[float, Tensor]:
    """The soft mask of |θ| at each β, with three tenths of the weights as the budget."""
    theta = weights()
    return {beta: soft_topk(theta.abs(), DENSITY * len(theta), beta) for beta in BETAS}


def projected(point: tuple[float, float]) -> Tensor:
    """Π₁ of a point of the plane."""
    x = torch.tensor(point, dtype=torch.float64)
    return torch.where(hard_topk(x.abs(), 1), x, 0.0)


def moves() -> dict[str, tuple[float, float]]:
    """How far each step of panel (c) goes, before and after projection."""
    found = {}
    for name, (a, b) in STEPS.items():
        before = (torch.tensor(b) - torch.tensor(a)).double().norm()
        found[name] = float(before), float((projected(b) - projected(a)).norm())
    return found


def label(beta: float) -> str:
    """β for people."""
    return "β → ∞" if beta == float("inf") else f"β = {beta:g}"


@register
class SoftTopK(Exhibit):
    """Curves of the mask m and of σ(θ) = θ·m."""

    order = 1
    name = "soft-topk"
    title = "soft top-k masks and soft-masked weights over β"
    where = "Figure 1"
    kind = "exact"

    def show(self, results: Results) -> Shown:
        """Each mask sums to the budget; β = 0 is a constant, β → ∞ the hard mask."""
        theta, found = weights(), masks()
        k = DENSITY * len(theta)
        rows = [
            [
                label(beta),
                f"{m.sum():.4f}",
                f"{m.min():.4f}",
                f"{m.max():.4f}",
                f"{int(((m > 0.01) & (m < 0.99)).sum())}",
            ]
            for beta, m in found.items()
        ]
        table = Table(
            f"Soft top-k of {len(theta)} weights spread evenly over [−2, 2], budget k = {k:g}",
            ["β", "Σ m", "smallest m", "largest m", "masks between 0.01 and 0.99"],
            rows,
        )
        far, near = (f"{before:.3f} → {after:.3f}" for before, after in moves().values())
        constant = torch.allclose(found[0.0], torch.full_like(theta, DENSITY), atol=1e-12)
        hard = torch.equal(found[float("inf")].bool(), hard_topk(theta.abs(), k))
        confirmed = constant and hard and all(abs(float(m.sum()) - k) < 1e-9 for m in found.values())
        claim = Claim(
            "At β = 0 the soft mask scales its input by a constant; as β → ∞ it becomes hard top-k selection",
            self.where,
            "confirmed" if confirmed else "not confirmed",
            f"m = {DENSITY:g} everywhere at β = 0; equal to the hard mask, bit for bit, at β = ∞; Σ m = k at every β",
        )
        line = (
            "the curves have the shape of Figure 1 (whose weights and β are not printed): Σ m = k at every β, "
            f"constant at 0, hard at ∞. A step in the plane before and after projection: {far} across the diagonal, "
            f"{near} beside an axis"
        )
        return Shown(line, [table], draw, [claim])


def draw() -> Any:
    """Panels (a), (b) and (c)."""
    theta, figure = weights(), new_figure(2.7)
    left, middle, right = figure.subplots(1, 3)
    for beta, m in masks().items():
        left.plot(theta.numpy(), m.numpy(), label=label(beta))
        middle.plot(theta.numpy(), (theta * m).numpy(), label=label(beta))
    left.set(xlabel="weight θ", ylabel="mask m", title="(a) soft top-k mask")
    middle.set(xlabel="weight θ", ylabel="θ · m", title="(b) soft-masked weight")
    middle.legend(loc="upper left", frameon=False, labelspacing=0.2)
    for (name, (a, b)), colour in zip(STEPS.items(), ("C1", "C0"), strict=True):
        pa, pb = (projected(point).tolist() for point in (a, b))
        right.annotate("", b, a, arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.8})
        right.plot([], [], color=colour, label=name)
        for start, end in ((a, pa), (b, pb)):
            right.plot(*zip(start, end, strict=True), linestyle=":", color=colour, linewidth=1)
        right.plot(*zip(pa, pb, strict=True), linestyle="--", color=colour, marker="o")
    right.fill_between([0, 1.2], [0, 0.24], color=ink(), alpha=0.12, linewidth=0)
    right.fill_betweenx([0, 1.2], [0, 0.24], color=ink(), alpha=0.12, linewidth=0)
    right.plot([0, 1.1], [0, 1.1], color=ink(), linewidth=0.8, alpha=0.5)
    right.set(xlabel="θ₁", ylabel="θ₂", xlim=(-0.05, 1.2), ylim=(-0.05, 1.5), title="(c) steps and projections")
    right.set_aspect("equal")  # steps of equal length look it
    right.legend(loc="upper right", frameon=False)
    return figure
