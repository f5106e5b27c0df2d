"""Figure 2: where the soft top-1 operator takes the standard Gaussian of the plane."""

import itertools
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.figures import ink, new_figure
from spartan.app.paper.results import Results
from spartan.app.paper.tables import Table
from spartan.ops import rows

BETAS = (0.0, 1.0, 3.0, 10.0, 30.0)
REACH, POINTS = 5.0, 900  # of the grid, a quadrant's side
WINDOW, BINS = 2.5, 75  # of the picture, likewise
NEAR = 0.1  # a distance from the axes


def operator(x: Tensor, beta: float) -> Tensor:
    """σ₁^β of every row of x (n × 2)."""
    u = x.abs()
    center, offset = rows.solve(u, 1, beta)
    return x * torch.sigmoid(beta * (u - center[:, None]) + offset[:, None])


@cache
def pushed(beta: float) -> tuple[Tensor, Tensor]:
    """Where σ₁^β takes a fine grid over a quadrant, and the Gaussian's mass of each point, out of 1 over the quadrant."""
    step = REACH / POINTS
    axis = step * (torch.arange(POINTS, dtype=torch.float64) + 0.5)
    mass = (-0.5 * axis**2).exp()
    mass /= mass.sum()
    return operator(torch.cartesian_prod(axis, axis), beta), (mass[:, None] * mass).flatten()


@cache
def density(beta: float) -> Tensor:
    """Probability per unit of area in each bin of a quadrant; the other quadrants are its mirror images."""
    y, mass = pushed(beta)
    place = (y * (BINS / WINDOW)).long()
    inside = (place < BINS).all(1)
    index = place[inside] @ torch.tensor([BINS, 1])
    found = torch.zeros(BINS * BINS, dtype=torch.float64).index_add_(0, index, mass[inside])
    return found.reshape(BINS, BINS) / 4 * (BINS / WINDOW) ** 2


def near_axes(beta: float) -> float:
    """The probability that the smaller entry of σ₁^β(x) is below `NEAR`."""
    y, mass = pushed(beta)
    return float(mass[y.amin(1) < NEAR].sum())


@register
class Densities(Exhibit):
    """Densities of σ₁^β(x) for x from N(0, I₂), by pushing a fine grid through the operator."""

    order = 2
    name = "densities"
    title = "densities of the soft top-1 operator on the 2D Gaussian over β"
    where = "Figure 2"
    kind = "exact"

    def show(self, results: Results) -> Shown:
        """The mass moves to the axes as β grows."""
        found = [near_axes(beta) for beta in BETAS]
        cells = [[f"{beta:g}", f"{100 * mass:.1f}"] for beta, mass in zip(BETAS, found, strict=True)]
        table = Table(f"Probability that the smaller entry is below {NEAR:g}", ["β", "%"], cells)
        grows = all(a < b for a, b in itertools.pairwise(found))
        figures = f"{100 * found[0]:.1f}% within {NEAR:g} of an axis at β = 0, {100 * found[-1]:.1f}% at {BETAS[-1]:g}"
        claim = Claim(
            "Higher values of β constrain iterates to be closer to the k-sparse feasible set",
            self.where,
            "confirmed" if grows else "not confirmed",
            figures,
        )
        line = f"as in Figure 2 (whose β are not printed) the mass moves onto the axes: {figures}"
        return Shown(line, [table], draw, [claim])


def draw() -> Any:
    """A panel for each β, darker where denser."""
    figure = new_figure(2.2)
    panels = figure.subplots(1, len(BETAS), sharey=True)
    # The colour of text over the page, so that dense is dark on light pages and bright on dark ones.
    from matplotlib.colors import LinearSegmentedColormap, to_rgb  # type: ignore[import-not-found,unused-ignore]

    shades = LinearSegmentedColormap.from_list("ink", [(*to_rgb(ink()), 0.0), (*to_rgb(ink()), 1.0)])
    for axes, beta in zip(panels, BETAS, strict=True):
        quadrant = density(beta)
        half = torch.cat([quadrant.flip(0), quadrant], 0)
        whole = torch.cat([half.flip(1), half], 1).T
        # Square roots: a density that is unbounded at the axes would leave the rest white.
        axes.imshow(
            whole.clamp(max=1.0).sqrt().numpy(),
            origin="lower",
            extent=[-WINDOW, WINDOW] * 2,
            cmap=shades,
            vmin=0,
            vmax=1,
        )
        axes.set(title=f"β = {beta:g}", xlabel="first entry", xticks=[-2, 0, 2], yticks=[-2, 0, 2])
        axes.grid(False)
    panels[0].set_ylabel("second entry")
    figure.supxlabel("shade: square root of the density, full at 1 per unit of area", fontsize=8)
    return figure
