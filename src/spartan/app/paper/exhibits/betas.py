"""Figure 4, left: accuracy over β_max, with and without dual averaging; and what freezes without it."""

from typing import Any

import torch
from torch import nn

from spartan import Sparsifier, Spartan, constant
from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.exhibits.exploration import SPARSITY, spartan
from spartan.app.paper.experiments import Experiment, Scale, topkast
from spartan.app.paper.figures import ink, new_figure
from spartan.app.paper.judging import ONE_SEED, difference, grows, listed, verdict
from spartan.app.paper.results import Results
from spartan.app.paper.tables import NONE, Table, text_of

BETAS: dict[Scale, tuple[float, ...]] = {
    "tiny": (2.5, 10.0, 40.0),
    "small": (2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0),
    "full": (2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0),
}
JUMPS = (2.5, 10.0, 40.0, 160.0)


def ablated(scale: Scale, beta: float) -> Experiment:
    """The same without the projection in the forward pass."""
    return spartan(scale, beta, ", project: false")


def jump(beta: float, project: bool) -> tuple[float, float]:
    """How much w changes when the mask freezes, ‖Δw‖ / ‖w‖: on the weights that are kept, and in all.

    A layer of 10,000 weights, uniform in ±0.1, at 95%; the learning rate is 0, so that nothing else changes w.
    """
    torch.manual_seed(0)
    layer = nn.Linear(100, 100, bias=False).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    method = Spartan(beta=constant(beta), project=project)
    sparsifier = Sparsifier(layer, SPARSITY, 10, method, warmup=0.0, finetune=0.5).attach(optimizer)
    before = layer.weight.detach().clone()
    while sparsifier.stats.phase != "finetune":
        before = layer.weight.detach().clone()
        layer(torch.ones(1, 100, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = layer.weight.detach()
    kept = after != 0
    on_kept = (after - before)[kept].norm() / before[kept].norm()
    return float(on_kept), float((after - before).norm() / before.norm())


@register
class Betas(Exhibit):
    """β_max with the projection and without it."""

    order = 16
    name = "betas"
    title = "sensitivity to β_max with and without dual averaging, and what freezes without it"
    where = "Figure 4 (left)"
    kind = "trained"

    def experiments(self, scale: Scale) -> list[Experiment]:
        """Both ways over β_max, and Top-KAST."""
        ways = [way(scale, beta) for beta in BETAS[scale] for way in (spartan, ablated)]
        return [topkast(scale, SPARSITY), *ways]

    def show(self, results: Results) -> Shown:
        """Accuracies, and the jump of w when finetuning begins."""
        scale, betas = results.scale, BETAS[results.scale]
        ours = {beta: results.score(spartan(scale, beta)) for beta in betas}
        without = {beta: results.score(ablated(scale, beta)) for beta in betas}
        level = results.score(topkast(scale, SPARSITY))
        header = ["", *(f"β_max = {beta:g}" for beta in betas)]
        cells = [["with dual averaging", *map(text_of, ours.values())], ["without", *map(text_of, without.values())]]
        cells.append(["Top-KAST", text_of(level), *[NONE] * (len(betas) - 1)])
        table = Table("Top-1 accuracy at 95% by β_max, %", header, cells)
        jumps = Table(
            "‖Δw‖ / ‖w‖ in the step that freezes the mask, on the kept weights and on all (10,000 weights, "
            "uniform in ±0.1)",
            ["β at that step", "with: kept", "with: all", "without: kept", "without: all"],
            [[f"{beta:g}", *(f"{value:.3f}" for way in (True, False) for value in jump(beta, way))] for beta in JUMPS],
        )
        pairs = [difference(results.scores(spartan(scale, b)), results.scores(ablated(scale, b))) for b in betas]
        low = [pair for beta, pair in zip(betas, pairs, strict=True) if beta <= 20]
        first, last = pairs[0], pairs[-1]
        most_at_low = None if first is None or last is None else first.value - last.value > ONE_SEED
        rising = grows([results.scores(ablated(scale, b)) for b in betas if b <= 80])
        known = listed(f"β_max = {b:g}: {p}" for b, p in zip(betas, pairs, strict=True) if p is not None)
        alone = listed(f"β_max = {b:g}: {s}" for b, s in without.items() if s is not None)
        claims = [
            Claim(
                "Without dual averaging accuracy grows with β_max, up to 80",
                self.where,
                verdict([rising]),
                alone,
            ),
            Claim(
                "Projection in the forward pass improves the final accuracy, most at low β_max",
                self.where,
                verdict([*(None if pair is None else pair.above for pair in low), most_at_low]),
                f"with over without: {known}",
            ),
        ]
        have = any(score is not None for score in without.values())
        line = f"with over without dual averaging here: {known}; the paper prints no values"
        return Shown(line, [table, jumps], (lambda: _draw(results)) if have else None, claims, NOTES)


NOTES = (
    "What freezes in the ablation: the paper computes a hard top-k mask at the end of epoch 80 and does not "
    "say with which values. "
    "Here the binary mask freezes: w = θ on the kept weights from then on and 0 elsewhere, where it was θ·m "
    "everywhere before. "
    "So w jumps once, on the kept weights by a factor of 1/m, and the others go; the last 20% of the run "
    "train from there. "
    "With dual averaging the soft values of m freeze, and nothing jumps. The released code has no such "
    "ablation to compare with.",
)


def _draw(results: Results) -> Any:
    figure = new_figure(3.0, 5.6)
    axes = figure.subplots()
    scale = results.scale
    for label, way, marker in (("with dual averaging", spartan, "o"), ("without", ablated, "s")):
        points = [(beta, results.score(way(scale, beta))) for beta in BETAS[scale]]
        known = [(beta, score) for beta, score in points if score is not None]
        spread = [score.std or 0.0 for _, score in known]
        axes.errorbar([b for b, _ in known], [s.mean for _, s in known], spread, marker=marker, capsize=2, label=label)
    level = results.score(topkast(scale, SPARSITY))
    if level is not None:
        axes.axhline(level.mean, linestyle="--", color=ink(), linewidth=1, label="Top-KAST")
    axes.set(xscale="log", xlabel="β_max", ylabel="top-1 accuracy (%)", title="95% sparsity, by β_max")
    axes.set_xticks(BETAS[scale], [f"{beta:g}" for beta in BETAS[scale]])
    axes.minorticks_off()
    axes.legend(frameon=False)
    return figure
