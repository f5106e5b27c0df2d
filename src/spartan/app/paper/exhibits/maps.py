"""Figure 6: the attention's input projections of a block-sparse vision transformer."""

import statistics
from typing import Any

from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.experiments import Experiment, Scale, vit
from spartan.app.paper.figures import ink, new_figure
from spartan.app.paper.judging import listed, verdict
from spartan.app.paper.results import Results, similarity
from spartan.app.paper.tables import NONE, Table

# Blocks that leave enough of them to see: the paper has 32×32 in matrices four times as wide as the small scale's.
SIDE: dict[Scale, int] = {"tiny": 8, "small": 8, "full": 32}


@register
class Maps(Exhibit):
    """Mean magnitudes of blocks; queries, keys and values side by side."""

    order = 20
    name = "maps"
    title = "weight maps of the attention's input projections in a block-sparse ViT"
    where = "Figure 6"
    kind = "trained"
    needs = ("maps",)

    def experiments(self, scale: Scale) -> list[Experiment]:
        """One of Spartan's runs of the ViT table."""
        return [vit(scale, "spartan", SIDE[scale])]

    def show(self, results: Results) -> Shown:
        """How alike queries and keys are, block by block, beside the other pairs."""
        record, side = results.get(self.experiments(results.scale)[0]), SIDE[results.scale]
        maps = (record or {}).get("maps", {})
        found = {name: similarity(map_) for name, map_ in maps.items()}
        pairs = ("queries, keys", "queries, values", "keys, values")
        cells = [[name, *(_text(alike[pair]) for pair in pairs)] for name, alike in found.items()]
        table = Table(
            f"Pearson correlation of the mean magnitudes of {side}×{side} blocks",
            ["layer", *pairs],
            cells or [[NONE] * 4],
        )
        values = {pair: [x for alike in found.values() if (x := alike[pair]) is not None] for pair in pairs}
        means = {pair: statistics.fmean(known) for pair, known in values.items() if known}
        known = listed(f"{pair} {mean:.3f}" for pair, mean in means.items())
        alike = None if len(means) < 3 else means[pairs[0]] > 0.2 + max(means[pair] for pair in pairs[1:])
        claim = Claim(
            "Queries and keys have similar sparsity patterns",
            "Appendix H",
            verdict([alike]),
            f"mean correlation over layers: {known}",
        )
        line = f"correlation of block magnitudes, mean over layers: {known}; the paper judges by eye"
        notes = [
            "Similar: 0.2 above the correlation of either with the values. Means over blocks are kept, not weights."
        ]
        return Shown(line, [table], (lambda: _draw(maps)) if maps else None, [claim], notes)


def _text(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _draw(maps: dict[str, list[list[float]]]) -> Any:
    """A panel a layer: the queries', keys' and values' matrices side by side, as the paper has them."""
    columns = min(3, len(maps))
    lines = -(-len(maps) // columns)
    figure = new_figure(0.6 + 1.2 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flat
    from matplotlib.colors import LinearSegmentedColormap, to_rgb  # type: ignore[import-not-found,unused-ignore]

    shades = LinearSegmentedColormap.from_list("ink", [(*to_rgb(ink()), 0.0), (*to_rgb(ink()), 1.0)])
    for number, (axes, map_) in enumerate(zip(panels, maps.values(), strict=False), 1):
        third = len(map_) // 3
        parts = [map_[i * third : (i + 1) * third] for i in range(3)]
        # Inputs downwards, outputs across: queries left, keys in the middle, values right.
        wide = [[row[i] for part in parts for row in part] for i in range(len(map_[0]))]
        axes.imshow(wide, cmap=shades, vmin=0, vmax=1, aspect="equal", interpolation="nearest")
        for edge in (third, 2 * third):
            axes.axvline(edge - 0.5, color="C1", linewidth=1)
        axes.set_xticks([third * (i + 0.5) - 0.5 for i in range(3)], ["queries", "keys", "values"])
        axes.set(yticks=[], title=f"block {number}", xlabel="outputs", ylabel="inputs")
        axes.grid(False)
    for axes in panels:
        axes.set_visible(False)
    figure.supxlabel("shade: mean |w| of a block, of the largest in its layer", fontsize=8)
    return figure
