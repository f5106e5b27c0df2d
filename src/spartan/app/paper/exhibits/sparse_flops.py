"""Tables 6 and 7: FLOPs of trained sparse models, in percent of the dense ones."""

from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.experiments import BLOCKS, SPARSITIES, Experiment, Scale, net, topkast, vit
from spartan.app.paper.judging import listed, verdict
from spartan.app.paper.published import printed
from spartan.app.paper.results import Results
from spartan.app.paper.tables import Table, text_of

METHODS = {"Top-KAST": "topkast", "Spartan": "spartan"}


def run(scale: Scale, method: str, sparsity: float) -> Experiment:
    """A run of the classifier, as the table of accuracies has it."""
    return topkast(scale, sparsity) if method == "Top-KAST" else net(scale, "spartan", sparsity)


@register
class SparseFlops(Exhibit):
    """What trained masks cost: it depends on the layers that they favour."""

    order = 13
    name = "sparse-flops"
    title = "FLOPs of trained sparse models, Spartan and Top-KAST"
    where = "Tables 6 and 7"
    kind = "trained"
    needs = ("flops",)

    def experiments(self, scale: Scale) -> list[Experiment]:
        """Runs of the tables of accuracies."""
        found = [run(scale, method, s) for method in METHODS for s in SPARSITIES[scale]]
        return found + [vit(scale, METHODS[method], side) for method in METHODS for side in BLOCKS[scale]]

    def show(self, results: Results) -> Shown:
        """Percentages beside the printed ones."""
        scale, cells, points = results.scale, [], []
        costs: dict[tuple[str, float], float | None] = {}
        for method in METHODS:
            cells.append([method])
            for s in SPARSITIES[scale]:
                score = results.score(run(scale, method, s), "flops")
                costs[method, s] = None if score is None else score.mean
                column = "97.5%" if s == 0.98 else f"{100 * s:g}%"
                cells[-1] += [text_of(score), text_of(printed("Table 6", method, 100, column))]
        header = ["method"]
        for s in SPARSITIES[scale]:
            header += [f"{100 * s:g}%", "paper" if s != 0.98 else "paper, 97.5%"]
        first = Table("FLOPs left, % of the dense classifier; the paper's are ResNet-50, 100 epochs", header, cells)
        rows, epochs = [], 300 if scale == "full" else 100
        for method in METHODS:
            rows.append([method])
            for side in BLOCKS[scale]:
                name = "Unstructured" if side == 1 else f"{side}×{side}"
                rows[-1] += [text_of(results.score(vit(scale, METHODS[method], side), "flops"))]
                rows[-1] += [text_of(printed("Table 7", method, epochs, name))]
        heads = ["method"]
        for side in BLOCKS[scale]:
            heads += ["single weights" if side == 1 else f"{side}×{side}", "paper"]
        second = Table(f"FLOPs left at 90%, % of the dense ViT; the paper's are ViT-B/16, {epochs} epochs", heads, rows)
        words = []
        for s in SPARSITIES[scale]:
            ours, theirs = costs["Spartan", s], costs["Top-KAST", s]
            points.append(None if ours is None or theirs is None else ours <= 1.05 * theirs)
            if ours is not None and theirs is not None:
                words.append(f"{100 * s:g}%: {ours:.2f} and {theirs:.2f}")
        claim = Claim(
            "Spartan's accuracy over Top-KAST's does not come with more FLOPs",
            "Appendix E",
            verdict(points),
            listed(words) + (" (Spartan and Top-KAST, % of dense)" if words else ""),
        )
        line = f"Spartan and Top-KAST here: {listed(words)}; published at 95%: 8.67 and 11.21"
        return Shown(line, [first, second], None, [claim], ["Not more: within 5% of Top-KAST's count, or below it."])
