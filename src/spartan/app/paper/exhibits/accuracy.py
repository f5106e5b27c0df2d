"""Tables 1 and 2: accuracy over sparsity, by method."""

from typing import Any

from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.experiments import SEEDS, SPARSITIES, Experiment, Scale, net, topkast
from spartan.app.paper.figures import MARKERS, ink, new_figure
from spartan.app.paper.judging import difference, listed, verdict
from spartan.app.paper.published import printed
from spartan.app.paper.results import Results
from spartan.app.paper.tables import NONE, Table, text_of

# The paper's rows: the method and what is set for it.
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "RigL (ERK)": ("rigl", ()),
    "STR": ("str", ()),
    "ProbMask": ("probmask", ()),
    "OptG": ("optg", ()),
    "IMP": ("imp", ()),
    "Top-KAST": ("topkast", ()),
    "Top-KAST with PP": ("powerprop", ()),
    "Top-KAST with ERK": ("topkast", ("budget=erk",)),
    "Top-KAST with PP & ERK": ("powerprop", ("budget=erk",)),
    "Spartan": ("spartan", ()),
}
TINY = ("IMP", "Top-KAST", "Top-KAST with ERK", "Spartan")
SEVERAL_SEEDS = ("Spartan", "Top-KAST")


def experiment(scale: Scale, row: str, sparsity: float) -> Experiment:
    """A run of a row."""
    method, sets = ROWS[row]
    return topkast(scale, sparsity) if row == "Top-KAST" else net(scale, method, sparsity, *sets)


def rows_of(scale: Scale) -> list[str]:
    """The rows of a scale."""
    return [row for row in ROWS if scale != "tiny" or row in TINY]


def column(sparsity: float) -> str:
    """The paper's column for a sparsity: it has 97.5% where CIFAR has 98%."""
    return "97.5%" if sparsity == 0.98 else f"{100 * sparsity:g}%"


@register
class Accuracy(Exhibit):
    """The paper's main table, on the classifier of a scale."""

    order = 10
    name = "accuracy"
    title = "accuracy over sparsity: Spartan, Top-KAST and its variants, IMP, RigL, STR, ProbMask, OptG, dense"
    where = "Tables 1 and 2"
    kind = "trained"

    def experiments(self, scale: Scale) -> list[Experiment]:
        """Spartan and Top-KAST first, with several seeds."""
        found = [net(scale, "dense")]
        for row in sorted(rows_of(scale), key=lambda row: row not in SEVERAL_SEEDS):
            for sparsity in SPARSITIES[scale]:
                one = experiment(scale, row, sparsity)
                found += one.at_seeds(SEEDS[scale]) if row in SEVERAL_SEEDS else [one]
        return found

    def show(self, results: Results) -> Shown:
        """Ours beside the printed ones, and the margins of Spartan."""
        scale, sparsities = results.scale, SPARSITIES[results.scale]
        dense = results.score(net(scale, "dense"))
        header = ["method"]
        for s in sparsities:
            header += [f"{100 * s:g}%", "paper" if column(s) == f"{100 * s:g}%" else f"paper, {column(s)}"]
        cells = []
        for row in rows_of(scale):
            cells.append([row])
            for s in sparsities:
                cells[-1] += [
                    text_of(results.score(experiment(scale, row, s))),
                    text_of(printed("Table 2", row, 100, column(s))),
                ]
        top = printed("Table 1", "ResNet-50", 100, "Accuracy %")
        cells.append(["dense", text_of(dense), text_of(top), *[NONE] * (2 * len(sparsities) - 2)])
        table = Table("Top-1 accuracy, %; the paper's are ResNet-50 on ImageNet-1K, 100 epochs", header, cells)
        margins = {s: self._margin(results, s) for s in sparsities}
        have = {s: m for s, m in margins.items() if m is not None}
        ours = listed((f"{100 * s:g}%: {m}" for s, m in have.items()))
        line = f"Spartan over Top-KAST here: {ours}. Published: " + listed(
            f"{column(s)}: {_published_margin(s):+.2f}" for s in sparsities if _published_margin(s) is not None
        )
        return Shown(line, [table], (lambda: draw(results)) if have else None, self._claims(results, margins), NOTES)

    def _margin(self, results: Results, sparsity: float) -> Any:
        ours, theirs = (results.scores(experiment(results.scale, row, sparsity)) for row in ("Spartan", "Top-KAST"))
        return difference(ours, theirs)

    def _claims(self, results: Results, margins: dict[float, Any]) -> list[Claim]:
        scale = results.scale
        high = [s for s in SPARSITIES[scale] if s >= 0.9]
        points, words = [], []
        # The paper has no Top-KAST at 99%, where it is unstable: long-training.
        both = [s for s in high if s < 0.99]
        for s in high:
            ours = results.scores(experiment(scale, "Spartan", s))
            for row in rows_of(scale):
                if row == "Spartan" or (row.startswith("Top-KAST") and s not in both):
                    continue
                found = difference(ours, results.scores(experiment(scale, row, s)))
                points.append(None if found is None else found.above)
                if found is not None and (not found.above or row == "Top-KAST"):
                    words.append(f"{100 * s:g}%: {found} over {row}")
        apart = [None if margins.get(s) is None else margins[s].above for s in both]
        return [
            Claim(
                "Spartan outperforms all baselines at sparsities of 90% and above",
                "Table 2",
                verdict(points),
                listed(words),
            ),
            Claim(
                "Spartan is more accurate than Top-KAST at 90%, 95% and 97.5% (small scale: 98%)",
                "Table 2",
                verdict(apart),
                listed(f"{100 * s:g}%: {margins[s]}" for s in both if margins.get(s) is not None),
            ),
        ]


NOTES = (
    "Sparsity counts the whole model. Top-KAST prunes every layer at small scale, as its rows of "
    "benchmarks/cifar10.csv did; the "
    "paper leaves the input convolution dense (variants has both).",
)


def _published_margin(sparsity: float) -> float | None:
    ours, theirs = (printed("Table 2", row, 100, column(sparsity)) for row in ("Spartan", "Top-KAST"))
    return None if ours is None or theirs is None else ours.value - theirs.value


def draw(results: Results) -> Any:
    """Ours on the left, the paper's on the right; density on a log scale, labelled as sparsity."""
    figure, scale = new_figure(3.9), results.scale
    left, right = figure.subplots(1, 2)
    sparsities = SPARSITIES[scale]
    for number, row in enumerate(ROWS):
        # Spartan first and thick, then Top-KAST; what is derived from it is dashed.
        colour, derived = (len(ROWS) - 1 - number) % 7, " with " in row
        style: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "color": f"C{colour}"}
        style |= {"linestyle": "--" if derived else "-", "linewidth": 2.4 if row == "Spartan" else 1.1}
        ours = [(s, results.score(experiment(scale, row, s))) for s in sparsities] if row in rows_of(scale) else []
        points = [(1 - s, score) for s, score in ours if score is not None]
        if points:
            spread = [score.std or 0.0 for _, score in points]
            left.errorbar([x for x, _ in points], [s.mean for _, s in points], spread, capsize=2, **style)
        printed_ = [
            (1 - float(c[:-1]) / 100, printed("Table 2", row, 100, c)) for c in ("80%", "90%", "95%", "97.5%", "99%")
        ]
        theirs = [(x, figure_.value) for x, figure_ in printed_ if figure_ is not None]
        right.plot([x for x, _ in theirs], [y for _, y in theirs], label=row, **style)
    dense, top = results.score(net(scale, "dense")), printed("Table 1", "ResNet-50", 100, "Accuracy %")
    for axes, level in ((left, None if dense is None else dense.mean), (right, None if top is None else top.value)):
        if level is not None:
            axes.axhline(level, linestyle=":", color=ink(), label="dense")
    names = {"tiny": "digits", "small": "WRN-22-2, CIFAR-10", "full": "ResNet-50, ImageNet-1K"}
    left.set(title=f"Here: {names[scale]}")
    right.set(title="The paper: ResNet-50, ImageNet-1K")
    for axes, ticks in ((left, sparsities), (right, SPARSITIES["full"])):
        axes.set(xscale="log", xlabel="sparsity", ylabel="top-1 accuracy (%)")
        axes.set_xticks([1 - s for s in ticks], [f"{100 * s:g}%" for s in ticks])
        axes.set_xlim(1.15 * (1 - ticks[0]), (1 - ticks[-1]) / 1.15)
        axes.minorticks_off()
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure
