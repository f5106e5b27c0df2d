"""Figure 3: how masks move over training, by IMP, Top-KAST and Spartan over β_max."""

import itertools
from typing import Any

from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.experiments import Experiment, Scale, net, topkast
from spartan.app.paper.figures import MARKERS, new_figure
from spartan.app.paper.judging import difference, listed, verdict
from spartan.app.paper.published import printed
from spartan.app.paper.results import Record, Results
from spartan.app.paper.tables import Table, text_of

SPARSITY = 0.95
# The paper shows three, of which 10 is the middle one; the others are not printed.
BETAS = (2.5, 10.0, 40.0)


def spartan(scale: Scale, beta: float, *more: str) -> Experiment:
    """Spartan at 95% with β from 1 to this."""
    own = () if beta == 10 and not more else (f"method_args={{beta: [1, {beta:g}]{''.join(more)}}}",)
    return net(scale, "spartan", SPARSITY, *own)


def rows_of(scale: Scale) -> dict[str, Experiment]:
    """From the one that explores least to the one that explores most, as the paper has it."""
    by_beta = {f"Spartan, β_max = {beta:g}": spartan(scale, beta) for beta in reversed(BETAS)}
    return {"IMP": net(scale, "imp", SPARSITY), **by_beta, "Top-KAST": topkast(scale, SPARSITY)}


def middle(record: Record, key: str) -> float | None:
    """The mean correlation over the intermediate phase: after the sparsity is reached, before the mask is fixed."""
    epochs, offset = record["epochs"], 1 if key == "with_previous" else 0
    values = record[key][round(0.2 * epochs) : round(0.8 * epochs) - offset]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


@register
class Exploration(Exhibit):
    """Correlations of masks with the final one and with the one before."""

    order = 15
    name = "exploration"
    title = "exploration and exploitation: correlations of masks over training, by method and β_max"
    where = "Figure 3"
    kind = "trained"
    needs = ("top1", "with_last")

    def experiments(self, scale: Scale) -> list[Experiment]:
        """One seed of each."""
        return list(rows_of(scale).values())

    def show(self, results: Results) -> Shown:
        """Means over the intermediate phase, accuracies, and the curves."""
        cells, last, before = [], {}, {}
        for row, one in rows_of(results.scale).items():
            record = results.get(one)
            known = record is not None and record.get("with_last")
            last[row] = middle(record, "with_last") if known and record else None
            before[row] = middle(record, "with_previous") if known and record else None
            theirs = printed("Figure 3", row, 100, "95%")
            pair = ("" if value is None else f"{value:.3f}" for value in (last[row], before[row]))
            cells.append([row, *(text or "–" for text in pair), text_of(results.score(one)), text_of(theirs)])
        header = ["method", "with the final mask", "between epochs", "top-1 %", "paper, top-1 %"]
        table = Table("Mean Pearson correlation of masks over the intermediate phase, 95%", header, cells)
        claims = self._claims(results, last, before)
        have = [row for row in last if last[row] is not None]
        known = listed(f"{row} {last[row]:.3f}" for row in have)
        line = f"correlation with the final mask here: {known}; the paper prints no values"
        notes = [
            "Of up to a million weights, at the end of each epoch. The mean is over epochs between 20% and "
            "80% of the run, where the figure has dotted lines."
        ]
        return Shown(line, [table], (lambda: _draw(results)) if have else None, claims, notes)

    def _claims(self, results: Results, last: dict[str, float | None], before: dict[str, float | None]) -> list[Claim]:
        names = list(last)  # from most fixed to most exploring

        def falling(found: dict[str, float | None], some: list[str]) -> list[bool | None]:
            pairs = [(found[a], found[b]) for a, b in itertools.pairwise(some)]
            return [None if a is None or b is None else a > b for a, b in pairs]

        def told(found: dict[str, float | None]) -> str:
            return listed(f"{row} {value:.3f}" for row, value in found.items() if value is not None)

        scale = results.scale
        scores = {row: results.scores(one) for row, one in rows_of(scale).items()}
        best = "Spartan, β_max = 10"
        margins = {row: difference(scores[best], scores[row]) for row in scores if row != best}
        second = difference(scores["Top-KAST"], scores["IMP"])
        words = listed(f"{row} {results.score(one)}" for row, one in rows_of(scale).items() if scores[row])
        return [
            Claim(
                "IMP converges on the final mask early: it explores least",
                "Figure 3, Section 3.2",
                verdict([*falling(last, ["IMP", names[1]]), *falling(before, ["IMP", names[1]])]),
                f"with the final mask: {told(last)}",
            ),
            Claim(
                "β_max correlates with the correlation with the final mask, and between epochs",
                "Figure 3, Section 3.2",
                verdict([*falling(last, names[1:-1]), *falling(before, names[1:-1])]),
                f"with the final mask: {told(last)}. Between epochs: {told(before)}",
            ),
            Claim(
                "Spartan lies between dual averaging (Top-KAST) and IMP",
                "Figure 3, Section 3.2",
                verdict([*falling(last, names), *falling(before, names)]),
                f"with the final mask: {told(last)}. Between epochs: {told(before)}",
            ),
            Claim(
                "The intermediate β_max = 10 is the most accurate, then Top-KAST, then IMP",
                "Figure 3, Section 3.2",
                verdict(None if m is None else m.above for m in (*margins.values(), second)),
                f"top-1: {words} (the paper: 74.6, 73.5 and 68.2 for β_max = 10, Top-KAST and IMP)",
            ),
        ]


def _draw(results: Results) -> Any:
    figure = new_figure(3.4)
    left, right = figure.subplots(1, 2)
    epochs = 1
    for number, (row, one) in enumerate(rows_of(results.scale).items()):
        record = results.get(one)
        if record is None or not record.get("with_last"):
            continue
        epochs = record["epochs"]
        style: dict[str, Any] = {"color": f"C{number}", "marker": MARKERS[number], "markevery": max(1, epochs // 8)}
        left.plot(range(1, epochs + 1), record["with_last"], label=row, **style)
        right.plot(range(2, epochs + 1), record["with_previous"], **style)
    left.set(title="With the mask at the end of training", xlabel="epoch", ylabel="Pearson correlation of masks")
    right.set(title="With the mask of the epoch before", xlabel="epoch", ylabel="Pearson correlation of masks")
    for axes in (left, right):
        for fraction in (0.2, 0.8):
            axes.axvline(fraction * epochs, linestyle=":", color="0.5", linewidth=1)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return figure
