"""Writes docs/reproduction.md: every exhibit, ours beside theirs, and what became of each claim of the paper."""

from collections import Counter
from pathlib import Path
from typing import get_args

from spartan.app.paper.exhibit import Exhibit, Made, Verdict, exhibits, file_stem, make, missing_line, wanted
from spartan.app.paper.experiments import ABOUT, SIDE_BY_SIDE, Scale, estimate
from spartan.app.paper.figures import write_figure
from spartan.app.paper.judging import RULE
from spartan.app.paper.results import Results, provenance

# What of an exhibit is on the page is what one command gives; a figure is shown for light pages or for dark ones.
_FIGURE = """<picture>
<source media="(prefers-color-scheme: dark)" srcset="{folder}/{stem}-dark.png">
<img alt="{title}" src="{folder}/{stem}.png">
</picture>
"""

# What the estimate of a scale is made from.
_ESTIMATED: dict[Scale, str] = {
    "tiny": "",
    "small": (
        "WRN-22-2's 40 epochs take about 35 s alone on an H200, and six such runs at once took 157 s, which was measured "
        f"and is taken for {SIDE_BY_SIDE:g} times as fast as one after the other; the other models' epochs are scaled "
        "from it and not measured."
    ),
    "full": "",
}


def write_page(path: Path, results: Results) -> Path:
    """Write the page, and its figures into a folder beside it."""
    made = {exhibit: make(exhibit, results, None) for exhibit in exhibits()}
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for exhibit, one in made.items():
        if one.shown.draw is not None:
            for file in write_figure(one.shown.draw, folder / file_stem(exhibit, results.scale)):
                if file.suffix == ".svg":
                    file.unlink()  # the page shows PNGs; the command writes both
    path.write_text(page(made, results, folder.name), "utf-8")
    return path


def page(made: dict[Exhibit, Made], results: Results, folder: str) -> str:
    """The text of the page."""
    parts = [_head(results), _claims(made)]
    kinds = {
        "exact": "## Computed\n\nNo training, no stored results: the same digits on every machine.\n",
        "measured": "## Measured\n",
        "trained": f"## Trained\n\n{_trained(results)}",
    }
    for kind, heading in kinds.items():
        parts.append(heading)
        parts += [_section(exhibit, one, results, folder) for exhibit, one in made.items() if exhibit.kind == kind]
    return "\n".join(parts)


def _head(results: Results) -> str:
    command = f"spartan paper page --scale {results.scale} --out docs/reproduction.md"
    return (
        "# The paper, reproduced\n\n"
        "Every table and figure of [Spartan: Differentiable Sparsity via Regularized Transportation]"
        "(https://arxiv.org/abs/2205.14107) (Tai, Tian and Lim, NeurIPS 2022), made again by one command each: "
        "`spartan paper list` names them, `spartan paper EXHIBIT` makes one. This page is written from the "
        "results by\n\n"
        f"```sh\n{command}\n```\n\n"
        "and a test compares it with them. “Paper” stands over figures that are printed there; the file "
        "`src/spartan/app/paper/published.csv` has each with its table. A dash is a figure that the paper "
        "does not have, or "
        "that is not measured here yet. Nothing on this page is estimated, but for training times.\n"
    )


def _claims(made: dict[Exhibit, Made]) -> str:
    found = [(exhibit, claim) for exhibit, one in made.items() for claim in one.shown.claims]
    counts = Counter(claim.verdict for _, claim in found)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict) if counts[verdict])
    lines = [
        "## What the paper claims\n",
        f"{len(found)} claims: {told}. {RULE} A claim about several points is not confirmed",
    ]
    lines[-1] += " if one of them speaks against it, and not yet measured while one is missing.\n"
    lines += ["| claim | in the paper | here | figures | exhibit |", "|---|---|---|---|---|"]
    for exhibit, claim in found:
        cells = (claim.text, claim.where, f"**{claim.verdict}**", claim.figures, f"[{exhibit.name}](#{exhibit.name})")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines.append("\n### What does not agree, and why\n")
    against = [claim for _, claim in found if claim.verdict == "not confirmed"]
    lines += [f"- {claim.text} ({claim.where}). Here: {claim.figures}." for claim in against] or ["Nothing so far."]
    return "\n".join(lines) + "\n"


def _trained(results: Results) -> str:
    runs = wanted(exhibits(), results.scale)
    missing = results.missing(runs)
    have = [record for one in runs if (record := results.get(one)) is not None]
    lines = [
        f"Scale {results.scale}: {ABOUT[results.scale]}. {len(runs) - len(missing)} of {len(runs)} runs have "
        "stored results."
    ]
    if any(results.get(one) is not None for one in missing):
        lines[-1] += " Some others have a stored accuracy, but not the masks, layers or FLOPs that an exhibit shows."
    if missing:
        lines.append(
            f"The others are made by `spartan paper all --scale {results.scale} --rerun"
            f"{'' if results.scale == 'tiny' else ' --jobs 6 --data DIR'}`: "
            f"{estimate(results.scale, missing)}. {_ESTIMATED[results.scale]}".rstrip()
        )
    if told := provenance(have):
        taken = sum("source" in record for record in have)
        rows = f"; {taken} are rows of `benchmarks/cifar10.csv`, from before there was this command" if taken else ""
        lines.append(f"Results are from {told}{rows}.")
    return "\n".join(lines) + "\n"


def _section(exhibit: Exhibit, one: Made, results: Results, folder: str) -> str:
    scale = f" --scale {results.scale}" if exhibit.kind == "trained" else ""
    lines = [f"### {exhibit.name}\n", f"{exhibit.where}: {exhibit.title}. `spartan paper {exhibit.name}{scale}`\n"]
    lines.append(f"{_sentence(one.shown.line)}\n")
    if one.shown.draw is not None:
        lines.append(_FIGURE.format(folder=folder, stem=file_stem(exhibit, results.scale), title=exhibit.title))
    lines += [table.markdown() for table in one.shown.tables]
    lines += [f"- {note}" for note in one.shown.notes]
    if missing := missing_line(exhibit, one, results.scale):
        lines.append(f"- {_sentence(missing)}")
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
