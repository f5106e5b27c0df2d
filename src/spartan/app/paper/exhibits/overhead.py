"""Figure 4, right: what three starts of Sinkhorn's iteration, and Newton's method, add to a training step over β."""

import csv
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

import torch

from spartan import soft_topk
from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.figures import MARKERS, new_figure
from spartan.app.paper.results import Results
from spartan.app.paper.tables import NONE, Table

WAYS = ("Sinkhorn, cold", "Sinkhorn, dual caching", "Sinkhorn, sorting", "ours")
BETAS = (1.0, 3.0, 10.0, 30.0, 100.0)
WEIGHTS, DENSITY = 200_000, 0.1


def measured() -> list[dict[str, str]]:
    """Rows of overhead.csv: training steps of a ResNet-50 on an H200, as `benchmarks/step.csv` has them."""
    text = (resources.files("spartan.app.paper") / "results" / "overhead.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def overheads() -> dict[str, dict[float, float]]:
    """Percent over the dense step, by way and β."""
    found: dict[str, dict[float, float]] = {way: {} for way in WAYS}
    for row in measured():
        found[row["way"]][float(row["beta"])] = 100 * (float(row["ratio"]) - 1)
    return found


@cache
def iterations(beta: float) -> dict[str, int]:
    """Passes over the weights that each way needs for a mask, in the middle of training.

    The dual that is cached is that of the weights before a step: here, moved by a thousandth of their spread.
    """
    rng = torch.Generator().manual_seed(0)
    theta = 0.05 * torch.randn(WEIGHTS, generator=rng, dtype=torch.float64)
    moved = theta + 5e-5 * torch.randn(WEIGHTS, generator=rng, dtype=torch.float64)
    k = DENSITY * WEIGHTS
    before = soft_topk(theta.abs(), k, beta, return_info=True)[1].mu
    paper: dict[str, Any] = {"solver": "sinkhorn", "return_info": True}
    u = moved.abs()
    return {
        WAYS[0]: soft_topk(u, k, beta, init="cold", **paper)[1].passes,
        WAYS[1]: soft_topk(u, k, beta, init=before, **paper)[1].passes,
        WAYS[2]: soft_topk(u, k, beta, init="threshold", **paper)[1].passes,
        WAYS[3]: soft_topk(u, k, beta, tol=1e-6, return_info=True)[1].passes,
    }


@register
class Overhead(Exhibit):
    """Step times that were measured and are stored; the iterations behind them, counted anew."""

    order = 6
    name = "overhead"
    title = "overhead of a training step over β: Sinkhorn cold, cached and sorted, and Newton's method"
    where = "Figure 4 (right)"
    kind = "measured"
    makes = "python benchmarks/bench_step.py --model resnet50 --sinkhorn"

    def show(self, results: Results) -> Shown:
        """Percent over a dense step, and passes over the weights."""
        found, rows = overheads(), measured()
        stored = sorted({beta for points in found.values() for beta in points})
        times = Table(
            "Training step of a ResNet-50 over the dense one, %",
            ["way", *(f"β = {beta:g}" for beta in stored)],
            [[way, *(f"+{points[b]:.2f}" if b in points else NONE for b in stored)] for way, points in found.items()],
        )
        passes = {beta: iterations(beta) for beta in BETAS}
        counts = Table(
            f"Passes over {WEIGHTS:,} Gaussian weights for one mask: Sinkhorn to the paper's 0.01, Newton to 1e-6",
            ["way", *(f"β = {beta:g}" for beta in BETAS)],
            [[way, *(str(passes[beta][way]) for beta in BETAS)] for way in WAYS],
        )
        low, high = stored[0], stored[-1]
        cold, cached, sort, ours = (found[way] for way in WAYS)
        about = (
            f"{rows[0]['device']}, torch {rows[0]['torch']}, commit {rows[0]['commit']}, batch {rows[0]['batch']}, bf16"
        )
        claims = [
            Claim(
                "Spartan adds approximately 5% to the time of a training step",
                self.where,
                "confirmed" if max(ours.values()) < 5 else "not confirmed",
                f"as an upper bound: ours adds {min(ours.values()):.2f} to {max(ours.values()):.2f}% "
                f"({about}). The paper's way "
                f"(sorting), iterated in plain torch, adds {min(sort.values()):.0f} to "
                f"{max(sort.values()):.0f}% to a compiled step "
                f"of {float(rows[0]['step_ms']) / float(rows[0]['ratio']):.1f} ms",
            ),
            Claim(
                "Standard Sinkhorn iteration costs more as β grows; dual caching and sorting prevent it",
                self.where,
                "confirmed"
                if cold[high] > 1.5 * cold[low] and all(way[high] < 1.5 * way[low] for way in (cached, sort))
                else "not confirmed",
                f"from β = {low:g} to {high:g}: cold +{cold[low]:.0f}% → +{cold[high]:.0f}%, caching "
                f"+{cached[low]:.0f}% → "
                f"+{cached[high]:.0f}%, sorting +{sort[low]:.0f}% → +{sort[high]:.0f}%",
            ),
            Claim(
                "Sorting has the lowest overhead of the three starts",
                self.where,
                "confirmed" if all(sort[b] <= min(cold[b], cached[b]) for b in stored) else "not confirmed",
                "lowest here: "
                + _lowest(found, stored)
                + f". At β = {low:g} both make {iterations(low)[WAYS[2]]} passes, and the sort itself costs "
                f"{sort[low] - cached[low]:.0f}% of a step",
            ),
        ]
        line = (
            f"ours adds {min(ours.values()):.1f} to {max(ours.values()):.1f}% where the paper has about 5% "
            "(on an A100); cold "
            f"Sinkhorn grows with β as published (+{cold[low]:.0f}% → +{cold[high]:.0f}%)"
        )
        notes = (
            f"Measured: {about}; `{self.makes}`, rows of benchmarks/step.csv.",
            "The paper has 50 iterations at batch 256 on an A100; its figure's values are not printed, but "
            "for about 5%.",
        )
        return Shown(line, [times, counts], lambda: draw(found), claims, notes)


def _lowest(found: dict[str, dict[float, float]], betas: Iterable[float]) -> str:
    """Which of the three starts adds least, and at which β."""
    where: dict[str, list[str]] = {}
    for beta in betas:
        least = min(WAYS[:3], key=lambda way: found[way][beta])
        where.setdefault(least.removeprefix("Sinkhorn, "), []).append(f"{beta:g}")
    return "; ".join(f"{way} at β = {', '.join(at)}" for way, at in where.items())


def draw(found: dict[str, dict[float, float]]) -> Any:
    """Overhead as it was measured, and passes."""
    figure = new_figure(3.0)
    left, right = figure.subplots(1, 2)
    for number, way in enumerate(WAYS):
        points = sorted(found[way].items())
        left.plot([b for b, _ in points], [p for _, p in points], marker=MARKERS[number], label=way)
        right.plot(BETAS, [iterations(beta)[way] for beta in BETAS], marker=MARKERS[number], label=way)
    left.set(xscale="log", yscale="log", xlabel="β", ylabel="step time over dense (%)", title="ResNet-50 step, H200")
    left.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    right.set(xscale="log", ylim=(0, None), xlabel="β", ylabel="passes over the weights", title="Passes for one mask")
    for axes in (left, right):
        axes.set_xticks([1, 10, 100], ["1", "10", "100"])
        axes.minorticks_off()
    right.legend(frameon=False)
    return figure
