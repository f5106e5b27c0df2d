"""Puts runs side by side: means over seeds as a table, CSV, Markdown and a plot of scores against sparsity."""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spartan.app.report.words import NONE, count, percent, size
from spartan.app.runs import BITS, TOP1, Measure, RunFolder, data_name, identity, measure_of_run, number, settings
from spartan.app.terminal import print_table

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class Row:
    """Finished runs that differ in their seed only."""

    data: str
    model: str
    method: str
    sparsity: float
    # keys, beyond the above, in which this row differs from others of the same data and model
    extra: Mapping[str, Any]
    runs: tuple[RunFolder, ...]
    # earlier runs of a seed that is among `runs`: no further sample, so no part of the means
    repeated: tuple[RunFolder, ...] = ()

    def values(self, key: str) -> list[float]:
        """One figure of each run's summary, by seed; nan where a run has none."""
        found = [(run.summary or {}).get(key) for run in self.runs]
        return [math.nan if value is None else float(value) for value in found]

    def mean(self, key: str) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.values(key))

    def percent(self, key: str) -> tuple[float | None, float | None]:
        """The mean over seeds and the sample standard deviation (n − 1), in percent; None where there is none."""
        return self._spread([100 * value for value in self.values(key)])

    @property
    def measure(self) -> Measure:
        """What these runs are compared by."""
        return measure_of_run(self.runs[0])

    @property
    def score(self) -> tuple[float | None, float | None]:
        """The mean of that and its sample standard deviation, as they are shown."""
        return self._spread(self.scores)

    @property
    def scores(self) -> list[float]:
        """That of every run, as it is shown; nan where it has none."""
        scale = 100 if self.measure.percent else 1
        return [scale * value for value in self.values(self.measure.key)]

    @staticmethod
    def _spread(values: Sequence[float]) -> tuple[float | None, float | None]:
        return number(statistics.fmean(values)), number(statistics.stdev(values)) if len(values) > 1 else None

    @property
    def flops(self) -> float:
        """FLOPs of the sparse model as a fraction of the dense one's."""
        dense = self.mean("flops_dense")
        return self.mean("flops_sparse") / dense if dense else math.nan

    @property
    def setting(self) -> str:
        """`extra` as text."""
        return " ".join(f"{key}={_short(value)}" for key, value in self.extra.items())

    @property
    def label(self) -> str:
        """The method and its setting: what a line of a chart stands for."""
        return f"{self.method} {self.setting}".strip()


def rows_of(runs: Sequence[RunFolder]) -> list[Row]:
    """The finished runs, grouped by everything but the seed; of runs with the same seed the newest counts."""
    groups: dict[str, list[RunFolder]] = {}
    finished = [run for run in runs if run.finished]
    for run in sorted(finished, key=lambda run: ((run.folder / "summary.json").stat().st_mtime, str(run.folder))):
        groups.setdefault(identity(run.config, seed=False), []).append(run)
    rows = []
    for members in groups.values():
        config, newest = members[0].config, {run.seed: run for run in members}
        here, own = (data_name(config), config.model), settings(config)
        peers = [group[0].config for group in groups.values()]
        others = [settings(peer) for peer in peers if (data_name(peer), peer.model) == here]
        differing = (k for k, v in own.items() if any(other[k] != v for other in others))
        extra = {key: own[key] for key in differing if key not in ("method", "sparsity")}
        chosen = tuple(newest[seed] for seed in sorted(newest))
        repeated = tuple(run for run in members if newest[run.seed] is not run)
        rows.append(Row(*here, config.method, members[0].sparsity, extra, chosen, repeated))
    return sorted(rows, key=lambda r: (r.data, r.model, r.sparsity, r.setting, r.method))


def panels_of(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows by data set and model: figures are comparable within these."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.data, row.model)):
        panels.setdefault((row.data, row.model), []).append(row)
    return panels


def curves_of(rows: Sequence[Row]) -> tuple[list[Row], dict[str, list[Row]]]:
    """What a chart shows of comparable rows: dense ones as levels, the others by label, each a line."""
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.label, row.sparsity)):
        if row.sparsity:
            lines.setdefault(row.label, []).append(row)
    return [row for row in rows if not row.sparsity], lines


def print_comparison(runs: Sequence[RunFolder]) -> None:
    """The table of the finished runs, and a line for each run that is not part of it."""
    rows = rows_of(runs)
    if rows:
        print_table(*table(rows))
    for run in (run for row in rows for run in row.repeated):
        print(f"{run.folder}: left out, a newer run repeats its seed {run.seed}")
    for run in (run for run in runs if not run.finished):
        reached = f"epoch {run.epochs[-1]['epoch'] if run.epochs else 0} of {run.planned_epochs}"
        print(f"{run.folder}: unfinished, {reached}; spartan train --resume {run.folder}")


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells for people."""
    cells = [_cells(row) for row in rows]
    optional = {"setting": any(row.extra for row in rows)}
    optional |= {by.heading: any(row.measure is by for row in rows) for by in (TOP1, BITS)}
    header = [key for key in cells[0] if optional.get(key, True)]
    return header, [[line[key] for key in header] for line in cells]


def _cells(row: Row) -> dict[str, str]:
    digits, (mean, std) = row.measure.digits, row.score
    score = f"{math.nan if mean is None else mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")
    by_seed = zip(row.runs, row.scores, strict=True)
    return {
        "data": row.data,
        "model": row.model,
        "method": row.method,
        "sparsity": f"{row.sparsity:g}",
        "setting": row.setting or NONE,
        "n": str(len(row.runs)),
        **{by.heading: score if row.measure is by else NONE for by in (TOP1, BITS)},
        "by seed": " ".join(f"{run.seed}:{value:.{digits}f}" for run, value in by_seed),
        "achieved": percent(row.mean("achieved_sparsity")),
        "FLOPs": percent(row.flops),
        "nonzero": count(row.mean("nonzero")),
        "size": f"{size(row.mean('model_bytes'))} of {size(row.mean('dense_bytes'))}",
        "seconds": f"{row.mean('seconds'):.1f}",
    }


def to_markdown(rows: Sequence[Row]) -> str:
    """The table for people, as Markdown."""
    header, cells = table(rows)
    lines = [header, ["---"] * len(header), *cells]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def to_csv(rows: Sequence[Row]) -> str:
    """One line a run, unrounded: what a spreadsheet or a notebook wants."""
    keys = [
        "top1",
        "top5",
        "test_loss",
        "bits_per_byte",
        "train_loss",
        "epochs",
        "achieved_sparsity",
        "flops_dense",
        "flops_sparse",
    ]
    keys += ["nonzero", "parameters", "model_parameters", "model_bytes", "dense_bytes", "seconds", "images_per_s"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "data", "model", "method", "sparsity", "setting", "seed", *keys])
    for row in rows:
        for run in row.runs:
            figures = [(run.summary or {}).get(key) for key in keys]
            about = [row.data, row.model, row.method, row.sparsity, row.setting]
            writer.writerow([run.folder, *about, run.seed, *figures])
    return text.getvalue()


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_short(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_short, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else "null" if value is None else str(value)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Scores against sparsity: a panel per data set and model, a line per method, seeds as dots, dense as a level."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        raise ValueError("--plot needs matplotlib: pip install 'spartan-sparsity[plot]'") from None
    panels = panels_of(rows)
    figure = Figure(figsize=(5.2 * len(panels) + 1.5, 4.2), layout="constrained")
    places = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, ((data, model), inside) in zip(places, panels.items(), strict=True):
        levels, lines = curves_of(inside)
        for row in levels:
            axes.axhline(statistics.fmean(row.scores), linestyle="--", color="0.45", label=row.label)
        for index, (label, members) in enumerate(lines.items()):
            color, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
            x, means = [1 - row.sparsity for row in members], [statistics.fmean(row.scores) for row in members]
            spread = [row.score[1] or 0.0 for row in members]
            axes.errorbar(x, means, spread, label=label, capsize=3, color=color, marker=marker)
            for at, row in zip(x, members, strict=True):
                axes.scatter([at] * len(row.runs), row.scores, s=10, alpha=0.4, color=color)
        axes.set(title=f"{model} on {data}", xlabel="sparsity", ylabel=inside[0].measure.label)
        axes.set_xticks([])
        if sparsities := sorted({row.sparsity for row in inside if row.sparsity}):
            # Density on a log scale, labelled as sparsity: 90, 95 and 98% lie about evenly apart.
            edge = 2.0 if len(sparsities) == 1 else 1.15  # a single point has no width of its own
            axes.set_xlim(edge * (1 - sparsities[0]), (1 - sparsities[-1]) / edge)
            axes.set_xscale("log")
            axes.set_xticks([1 - s for s in sparsities], [f"{100 * s:g}%" for s in sparsities])
            axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
    try:
        figure.savefig(path, dpi=160)
    except ValueError as error:
        raise ValueError(f"--plot {path}: {error}") from None
