"""Table 3: a vision transformer at 90%, single weights and blocks."""

from typing import Any

from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.experiments import BLOCKS, Experiment, Scale
from spartan.app.paper.experiments import vit as run
from spartan.app.paper.figures import MARKERS, ink, new_figure
from spartan.app.paper.judging import beside, difference, listed, verdict
from spartan.app.paper.published import printed
from spartan.app.paper.results import Results
from spartan.app.paper.tables import NONE, Table, text_of

METHODS = {"Top-KAST": "topkast", "Spartan": "spartan"}
# The full recipes are the paper's longer ones.
PAPERS_EPOCHS: dict[Scale, int] = {"tiny": 100, "small": 100, "full": 300}
SEEDS: dict[Scale, int] = {"tiny": 1, "small": 1, "full": 3}


def column(side: int) -> str:
    """The paper's column."""
    return "Unstructured" if side == 1 else f"{side}×{side}"


@register
class ViTTable(Exhibit):
    """Spartan, Top-KAST and dense training of a small ViT."""

    order = 14
    name = "vit"
    title = "a ViT at 90%: single weights and three block sizes, Spartan, Top-KAST and dense"
    where = "Tables 1 and 3"
    kind = "trained"

    def experiments(self, scale: Scale) -> list[Experiment]:
        """Every structure."""
        sparse = [run(scale, method, side) for side in BLOCKS[scale] for method in METHODS.values()]
        return [many for one in [run(scale, "dense", 1), *sparse] for many in one.at_seeds(SEEDS[scale])]

    def show(self, results: Results) -> Shown:
        """Ours beside the printed ones, and Spartan's margins."""
        scale, sides = results.scale, BLOCKS[results.scale]
        header, cells, epochs = ["method"], [], PAPERS_EPOCHS[scale]
        for side in sides:
            header += ["single weights" if side == 1 else f"{side}×{side}", "paper"]
        for label, method in METHODS.items():
            cells.append([label])
            for side in sides:
                cells[-1] += [text_of(results.score(run(scale, method, side)))]
                cells[-1] += [text_of(printed("Table 3", label, epochs, column(side)))]
        top = printed("Table 1", "ViT-B/16", epochs, "Accuracy %")
        dense = results.score(run(scale, "dense", 1))
        cells.append(["dense", text_of(dense), text_of(top), *[NONE] * (2 * len(sides) - 2)])
        margins = {}
        for side in sides:
            ours, theirs = (results.scores(run(scale, METHODS[m], side)) for m in ("Spartan", "Top-KAST"))
            margins[side] = difference(ours, theirs)
        have = {side: m for side, m in margins.items() if m is not None}
        known = listed(f"{'single weights' if side == 1 else f'{side}×{side}'}: {m}" for side, m in have.items())
        blocks, single = [margins[side] for side in sides if side > 1], margins[1]
        wide = [None if m is None or single is None else m.value > 2 * max(single.value, 0.5) for m in blocks]
        claims = [
            Claim(
                "Spartan outperforms Top-KAST for both unstructured and block structured pruning",
                "Table 3",
                verdict(None if m is None else m.above for m in margins.values()),
                known,
            ),
            self._near_dense(results),
            Claim("The margin over Top-KAST is particularly large in blocks", "Table 3", verdict(wide), known),
        ]
        line = f"Spartan over Top-KAST here: {known}. Published (100 epochs): single weights +1.83, 16×16 +7.93, 32×32 +9.71"
        caption = f"Top-1 accuracy at 90%, %; the paper's are ViT-B/16 on ImageNet-1K, {epochs} epochs"
        tables = [Table(caption, header, cells)]
        notes = ["Large: more than twice the margin with single weights, and more than a point."]
        if scale != "full":
            notes += [
                "The patches' convolution and the head are dense in every column, so that structures prune "
                "the same layers."
            ]
        return Shown(line, tables, (lambda: _draw(results)) if have else None, claims, notes)

    def _near_dense(self, results: Results) -> Claim:
        """The abstract's other half: 16×16 blocks cost little."""
        top, ours = (results.score(run(results.scale, *which)) for which in (("dense", 1), ("spartan", 16)))
        below = None if top is None or ours is None else top.mean - ours.mean
        return Claim(
            "90% sparse in 16×16 blocks, Spartan loses less than 1% to dense training",
            "Abstract",
            verdict([None if below is None else below < 1]),
            "no results yet" if below is None else f"{beside(below)} dense (the paper: 0.94 below, at 300 epochs)",
        )


def _draw(results: Results) -> Any:
    """By structure, ours and the paper's."""
    figure, scale = new_figure(3.0), results.scale
    left, right = figure.subplots(1, 2)
    dense, top = results.score(run(scale, "dense", 1)), printed("Table 1", "ViT-B/16", 100, "Accuracy %")
    ours, theirs = {}, {}
    for label, method in METHODS.items():
        scores = [results.score(run(scale, method, side)) for side in BLOCKS[scale]]
        figures = [printed("Table 3", label, 100, column(side)) for side in BLOCKS["full"]]
        ours[label] = [None if score is None else score.mean for score in scores]
        theirs[label] = [None if one is None else one.value for one in figures]
    _points(left, ours, BLOCKS[scale], None if dense is None else dense.mean)
    _points(right, theirs, BLOCKS["full"], None if top is None else top.value)
    left.set(title="Here", xlabel="structure", ylabel="top-1 accuracy (%)")
    right.set(title="The paper: ViT-B/16, 100 epochs", xlabel="structure", ylabel="top-1 accuracy (%)")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _points(axes: Any, found: dict[str, list[float | None]], sides: tuple[int, ...], dense: float | None) -> None:
    """A line a method over structures, and the dense level."""
    for number, (label, values) in enumerate(reversed(found.items())):  # Spartan in the first colour, as elsewhere
        known = [(i, value) for i, value in enumerate(values) if value is not None]
        axes.plot([x for x, _ in known], [y for _, y in known], marker=MARKERS[number], color=f"C{number}", label=label)
        for x, y in known:  # the higher one's figure stands above it, the lower one's below
            others = [other[x] for name, other in found.items() if name != label]
            above = all(other is None or y > other or (y == other and not number) for other in others)
            axes.annotate(
                f"{y:.1f}", (x, y), (0, 6 if above else -12), textcoords="offset points", ha="center", fontsize=7
            )
    if dense is not None:
        axes.axhline(dense, linestyle=":", color=ink(), label="dense")
    axes.set_xticks(range(len(sides)), ["single" if side == 1 else f"{side}×{side}" for side in sides])
    axes.margins(x=0.12, y=0.15)
