"""Figure 5: how sparse each layer of a vision transformer is, with single weights and with blocks."""

import statistics
from typing import Any

from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.experiments import BLOCKS, Experiment, Scale, vit
from spartan.app.paper.figures import MARKERS, new_figure
from spartan.app.paper.judging import listed, verdict
from spartan.app.paper.results import Record, Results
from spartan.app.paper.tables import NONE, Table

# The four matrices of a block: how their names end, here and in torchvision.
KINDS = {
    "attention, input": (".attn.qkv.weight", ".self_attention.in_proj_weight"),
    "attention, output": (".attn.proj.weight", ".self_attention.out_proj.weight"),
    "MLP, first": (".mlp.0.weight", ".mlp.0.weight"),
    "MLP, second": (".mlp.2.weight", ".mlp.3.weight"),
}


def by_kind(record: Record) -> dict[str, list[float]]:
    """Sparsity in percent of each kind of matrix, from the first block to the last."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for name, parameters, kept in record["layers"]:
        for kind, ends in KINDS.items():
            if name.endswith(ends):
                found[kind].append(100 * (1 - kept / parameters))
    return found


def later_density(record: Record) -> float:
    """Percent of the output projections that is kept in the second half of the blocks."""
    values = by_kind(record)["attention, output"]
    return 100 - statistics.fmean(values[len(values) // 2 :])


@register
class Layers(Exhibit):
    """Per-layer sparsities of the ViTs trained with Spartan."""

    order = 19
    name = "layers"
    title = "per-layer sparsity of ViTs trained with Spartan, single weights and blocks"
    where = "Figure 5"
    kind = "trained"
    needs = ("layers",)

    def experiments(self, scale: Scale) -> list[Experiment]:
        """Spartan's runs of the ViT table."""
        return [vit(scale, "spartan", side) for side in BLOCKS[scale]]

    def show(self, results: Results) -> Shown:
        """Sparsity by kind of matrix and block of the network."""
        records = {side: results.get(vit(results.scale, "spartan", side)) for side in BLOCKS[results.scale]}
        have = {side: record for side, record in records.items() if record is not None}
        depth = max((len(values) for r in have.values() for values in by_kind(r).values()), default=0)
        cells = [
            [_name(side), kind, *(f"{value:.2f}" for value in values)]
            for side, record in have.items()
            for kind, values in by_kind(record).items()
        ]
        header = ["structure", "matrix", *(f"block {i + 1}" for i in range(depth))]
        table = Table("Sparsity by layer, %", header, cells or [[NONE] * len(header)])
        single = later_density(have[1]) if 1 in have else None
        blocks = [later_density(have[side]) if side in have else None for side in BLOCKS[results.scale] if side > 1]
        known = listed(f"{_name(side)}: {later_density(record):.1f}%" for side, record in have.items())
        claim = Claim(
            "In blocks, output projections of attention stay much denser in the later blocks of the network",
            "Appendix H",
            verdict(None if single is None or dense is None else dense > 1.5 * single for dense in blocks),
            f"output projections kept in the second half of the network: {known}",
        )
        line = f"output projections kept in the second half of the network: {known}; the paper prints no values"
        notes = ["Much denser: half as much again is kept as with single weights."]
        return Shown(line, [table], (lambda: _draw(have)) if have else None, [claim], notes)


def _name(side: int) -> str:
    return "single weights" if side == 1 else f"{side}×{side}"


def _draw(have: dict[int, Record]) -> Any:
    figure = new_figure(2.9)
    panels = figure.subplots(1, len(have), sharey=True, squeeze=False)[0]
    for axes, (side, record) in zip(panels, have.items(), strict=True):
        for number, (kind, values) in enumerate(by_kind(record).items()):
            axes.plot(range(1, len(values) + 1), values, marker=MARKERS[number], color=f"C{number}", label=kind)
        axes.set(title=_name(side), xlabel="block of the network")
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel("sparsity (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure
