"""Table 9: variants of Top-KAST."""

from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.experiments import STEM, Experiment, Scale, net
from spartan.app.paper.judging import difference, listed, verdict
from spartan.app.paper.published import printed
from spartan.app.paper.results import Results
from spartan.app.paper.tables import Table, text_of

SPARSITIES: dict[Scale, tuple[float, ...]] = {"tiny": (0.95,), "small": (0.9, 0.95), "full": (0.9, 0.95)}


def rows_of(scale: Scale) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The method of each row, and what is set for it."""
    return {
        "Top-KAST (ERK)": ("topkast", ("budget=erk",)),
        "Top-KAST (prune all)": ("topkast", ()),
        "Top-KAST (excl. input conv.)": ("topkast", (STEM[scale],)),
        "Top-KAST (Powerpropagation)": ("powerprop", ()),
        "Spartan": ("spartan", ()),
    }


def run(scale: Scale, row: str, sparsity: float) -> Experiment:
    """A run of a row."""
    method, sets = rows_of(scale)[row]
    return net(scale, method, sparsity, *sets)


@register
class Variants(Exhibit):
    """Budgets and exclusions of Top-KAST beside Spartan."""

    order = 18
    name = "variants"
    title = "variants of Top-KAST: ERK, prune all, excluded input convolution, Powerpropagation"
    where = "Table 9"
    kind = "trained"

    def experiments(self, scale: Scale) -> list[Experiment]:
        """Every variant."""
        return [run(scale, row, s) for s in SPARSITIES[scale] for row in rows_of(scale)]

    def show(self, results: Results) -> Shown:
        """Ours beside the printed ones."""
        scale, cells, words, points = results.scale, [], [], []
        for row in rows_of(scale):
            cells.append([row])
            for s in SPARSITIES[scale]:
                column = f"{100 * s:g}%"
                theirs = printed("Table 9", row, 100, column) or (
                    printed("Table 2", "Top-KAST with PP", 100, column) if "Power" in row else None
                )
                cells[-1] += [text_of(results.score(run(scale, row, s))), text_of(theirs)]
        header = ["method", *(word for s in SPARSITIES[scale] for word in (f"{100 * s:g}%", "paper"))]
        table = Table("Top-1 accuracy, %; the paper's are ResNet-50 on ImageNet-1K, 100 epochs", header, cells)
        for s in SPARSITIES[scale]:
            ours = results.scores(run(scale, "Spartan", s))
            for row in list(rows_of(scale))[:-1]:
                margin = difference(ours, results.scores(run(scale, row, s)))
                points.append(None if margin is None else margin.above)
                if margin is not None:
                    words.append(f"{100 * s:g}%: {margin} over {row.removeprefix('Top-KAST ')}")
        claim = Claim(
            "Spartan is more accurate than every variant of Top-KAST at 90% and 95%",
            "Table 9",
            verdict(points),
            listed(words),
        )
        notes = ["Powerpropagation is a row of Table 2; its published figures are from there."]
        return Shown(f"Spartan over the variants here: {listed(words)}", [table], None, [claim], notes)
