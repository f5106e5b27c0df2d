"""Tables 1 and 2: what longer training gives, dense and sparse."""

from typing import Any

from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.experiments import LENGTHS, Experiment, Scale, net, topkast
from spartan.app.paper.figures import MARKERS, new_figure
from spartan.app.paper.judging import ONE_SEED, beside, listed, verdict
from spartan.app.paper.published import printed
from spartan.app.paper.results import Results
from spartan.app.paper.tables import Table, text_of

SPARSE: dict[Scale, tuple[float, ...]] = {"tiny": (0.95,), "small": (0.95, 0.98), "full": (0.95, 0.975)}


def rows_of(scale: Scale) -> dict[str, list[Experiment]]:
    """The runs of each row, from the shortest to the longest."""
    found = {"dense": [net(scale, "dense", None, *length) for length in LENGTHS[scale]]}
    for s in SPARSE[scale]:
        found[f"Top-KAST, {100 * s:g}%"] = [topkast(scale, s, *length) for length in LENGTHS[scale]]
    for s in SPARSE[scale]:
        found[f"Spartan, {100 * s:g}%"] = [net(scale, "spartan", s, *length) for length in LENGTHS[scale]]
    return found


def paper(row: str, epochs: int) -> Any:
    """The printed figure of a row."""
    if row == "dense":
        return printed("Table 1", "ResNet-50", epochs, "Accuracy %")
    method, _, sparsity = row.partition(", ")
    return printed("Table 2", method, epochs, "97.5%" if sparsity == "98%" else sparsity)


@register
class Length(Exhibit):
    """Short and long training side by side."""

    order = 11
    name = "length"
    title = "two training lengths: sparse training gains more from time than dense training"
    where = "Tables 1 and 2"
    kind = "trained"

    def experiments(self, scale: Scale) -> list[Experiment]:
        """Every row at every length."""
        return [one for runs in rows_of(scale).values() for one in runs]

    def show(self, results: Results) -> Shown:
        """Accuracies, and the gain from the shortest to the longest."""
        scale, cells, gains = results.scale, [], {}
        epochs = [one.config().epochs for one in rows_of(scale)["dense"]]
        for row, runs in rows_of(scale).items():
            scores = [results.score(one) for one in runs]
            first, last = scores[0], scores[-1]
            gains[row] = None if first is None or last is None else last.mean - first.mean
            short, long = paper(row, 100), paper(row, 400)
            theirs = None if short is None or long is None else f"{long.value - short.value:+.2f}"
            gain = gains[row]
            ours = None if gain is None else f"{gain:+.2f}"
            cells.append([row, *map(text_of, (*scores, ours, short, long, theirs))])
        header = ["", *(f"{n} epochs" for n in epochs), "gain", "paper, 100", "paper, 400", "gain"]
        table = Table("Top-1 accuracy by training length, %; the paper's are ResNet-50 on ImageNet-1K", header, cells)
        sparse = {row: gain for row, gain in gains.items() if row != "dense"}
        dense = gains["dense"]
        points = [None if gain is None or dense is None else gain - dense > ONE_SEED for gain in sparse.values()]
        known = listed(f"{row} {gain:+.2f}" for row, gain in gains.items() if gain is not None)
        claim = Claim(
            "More epochs improve sparse models more than dense ones",
            "Section 4.1",
            verdict(points),
            f"from {epochs[0]} to {epochs[-1]} epochs: {known}",
        )
        pair = [results.score(rows_of(scale)[row][-1]) for row in ("dense", "Spartan, 95%")]
        below = None if pair[0] is None or pair[1] is None else pair[0].mean - pair[1].mean
        near = Claim(
            "At 95% Spartan is within 1% of fully dense training",
            "Section 4.1",
            verdict([None if below is None else below < 1]),
            "no results yet"
            if below is None
            else f"{beside(below)} dense after {epochs[-1]} epochs (the paper: 0.69 below)",
        )
        line = (
            f"gains from {epochs[0]} to {epochs[-1]} epochs: {known}. Published, 100 to 400: dense +0.09, "
            "Top-KAST 95% +2.39, "
            "Spartan 95% +1.80"
        )
        draw = (lambda: _draw(results)) if any(gain is not None for gain in gains.values()) else None
        return Shown(line, [table], draw, [claim, near])


def _draw(results: Results) -> Any:
    figure = new_figure(3.2)
    left, right = figure.subplots(1, 2)
    for number, (row, runs) in enumerate(rows_of(results.scale).items()):
        points = [(one.config().epochs, results.score(one)) for one in runs]
        known = [(x, score.mean) for x, score in points if score is not None]
        marker = MARKERS[number]
        left.plot([x for x, _ in known], [y for _, y in known], marker=marker, color=f"C{number}", label=row)
        theirs = [(e, paper(row, e)) for e in (100, 200, 400)]
        also = [(x, figure_.value) for x, figure_ in theirs if figure_ is not None]
        right.plot([x for x, _ in also], [y for _, y in also], marker=marker, color=f"C{number}")
    for axes, title in ((left, "Here"), (right, "The paper (98% here is 97.5% there)")):
        axes.set(title=title, xlabel="epochs", ylabel="top-1 accuracy (%)", xscale="log")
        ticks = [one.config().epochs for one in rows_of(results.scale)["dense"]] if axes is left else [100, 200, 400]
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return figure
