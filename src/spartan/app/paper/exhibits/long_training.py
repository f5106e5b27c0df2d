"""Table 2 and Section 4.1: 99% sparsity, trained ever longer; and whether Top-KAST stays stable there."""

from typing import Any

from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.experiments import LENGTHS, LONGEST, SEEDS, Experiment, Scale, net, topkast
from spartan.app.paper.figures import MARKERS, new_figure
from spartan.app.paper.judging import grows, listed, verdict
from spartan.app.paper.published import printed
from spartan.app.paper.results import Results
from spartan.app.paper.tables import Table, text_of

SPARSITY = 0.99
METHODS = ("Spartan", "Top-KAST")
# A method is called unstable where a run ends so many points below the best of its seeds, or of its own epochs.
FALL = 5.0


def runs(scale: Scale, method: str) -> list[Experiment]:
    """From the shortest to the longest."""
    lengths = (*LENGTHS[scale], LONGEST[scale])
    if method == "Top-KAST":
        return [topkast(scale, SPARSITY, *length) for length in lengths]
    return [net(scale, "spartan", SPARSITY, *length) for length in lengths]


def falls(results: Results, experiment: Experiment) -> list[float]:
    """How many points each seed ends below its own best epoch."""
    found = (results.get(one) for one in experiment.at_seeds(10))
    return [100 * (max(r["top1_by_epoch"]) - r["top1"]) for r in found if r is not None and r.get("top1_by_epoch")]


@register
class LongTraining(Exhibit):
    """99% over training length."""

    order = 12
    name = "long-training"
    title = "99% sparsity with long training, and the stability of Spartan and Top-KAST there"
    where = "Table 2, Section 4.1"
    kind = "trained"
    needs = ("top1", "top1_by_epoch")

    def experiments(self, scale: Scale) -> list[Experiment]:
        """The shortest with several seeds: stability is about those."""
        found = [one for method in METHODS for one in runs(scale, method)[0].at_seeds(SEEDS[scale])]
        return found + [one for method in METHODS for one in runs(scale, method)[1:]]

    def show(self, results: Results) -> Shown:
        """Accuracy by length, and how far runs end below their best."""
        scale = results.scale
        epochs = [one.config().epochs for one in runs(scale, "Spartan")]
        scores = {method: [results.score(one) for one in runs(scale, method)] for method in METHODS}
        cells = [[method, *map(text_of, found)] for method, found in scores.items()]
        theirs = [printed("Table 2", "Spartan", e, "99%") for e in (100, 200, 400)]
        far = printed("Section 4.1", "Spartan", 800, "99%")
        paper = ", ".join(f"{e}: {f}" for e, f in zip((100, 200, 400, 800), (*theirs, far), strict=True))
        table = Table(
            f"Top-1 accuracy at 99% by epochs, % (the paper's Spartan, {paper})", ["method", *map(str, epochs)], cells
        )
        rising = grows([results.scores(one) for one in runs(scale, "Spartan")])
        known = listed(f"{e}: {s}" for e, s in zip(epochs, scores["Spartan"], strict=True) if s is not None)
        stable = {method: self._stable(results, runs(scale, method)) for method in METHODS}
        claims = [
            Claim(
                "At 99% Spartan keeps improving with training time",
                "Section 4.1",
                verdict([rising]),
                f"by epochs: {known}",
            ),
            Claim(
                "Top-KAST trains unstably at 99%, where Spartan does not",
                "Section 4.1",
                verdict([stable["Spartan"][0], None if stable["Top-KAST"][0] is None else not stable["Top-KAST"][0]]),
                f"Spartan: {stable['Spartan'][1]}. Top-KAST: {stable['Top-KAST'][1]}",
            ),
        ]
        line = f"Spartan at 99% here, by epochs: {known}; published {paper}"
        draw = (lambda: _draw(results)) if any(s is not None for found in scores.values() for s in found) else None
        rule = (
            f"Unstable: a run that ends more than {FALL:g} points below the best of its seeds, or its own best epoch."
        )
        return Shown(line, [table], draw, claims, [rule])

    def _stable(self, results: Results, found: list[Experiment]) -> tuple[bool | None, str]:
        """Whether no run fell, and the figures."""
        words, worst, count = [], 0.0, 0
        for one in found:
            scores, own = results.scores(one), falls(results, one)
            if scores:
                count += 1
                spread, fall = max(scores) - min(scores), max(0.0, *own) if own else 0.0
                worst = max(worst, spread, fall)
                who = f"{len(scores)} seeds within {spread:.2f} end up to" if len(scores) > 1 else "1 seed ends"
                words.append(f"{one.config().epochs} epochs: {who} {fall:.2f} below the best epoch")
        return (None if count < len(found) else worst <= FALL), listed(words)


def _draw(results: Results) -> Any:
    figure = new_figure(3.0, 5.6)
    axes = figure.subplots()
    for number, method in enumerate(METHODS):
        points = [(one.config().epochs, results.score(one)) for one in runs(results.scale, method)]
        known = [(x, score.mean) for x, score in points if score is not None]
        axes.plot([x for x, _ in known], [y for _, y in known], marker=MARKERS[number], label=method)
    axes.set(xscale="log", xlabel="epochs", ylabel="top-1 accuracy (%)", title="99% sparsity, by training length")
    ticks = [one.config().epochs for one in runs(results.scale, "Spartan")]
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.legend(frameon=False)
    return figure
