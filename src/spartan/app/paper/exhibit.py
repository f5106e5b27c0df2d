"""What an exhibit of the paper is, and the registry that the command, its help, the page and the tests are made from."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from spartan.app.paper.experiments import SCALES, Experiment, Scale, estimate
from spartan.app.paper.figures import Draw, write_figure
from spartan.app.paper.results import Results
from spartan.app.paper.tables import Table
from spartan.wording import nearest

Verdict = Literal["confirmed", "not confirmed", "not yet measured", "not testable at this scale"]


@dataclass(frozen=True)
class Claim:
    """Something that the paper says, and what became of it here."""

    text: str
    where: str
    verdict: Verdict
    figures: str


@dataclass(frozen=True)
class Shown:
    """An exhibit as it is made from what there is.

    Args:
        line: one line on how it compares with the published one.
        tables: each becomes a Markdown and a CSV file.
        draw: draws the figure; None where there is none, or nothing to draw.
        claims: of the paper's, that this exhibit is about.
        notes: what a reader has to know to read it.
    """

    line: str
    tables: Sequence[Table] = ()
    draw: Draw | None = None
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()


class Exhibit(ABC):
    """One table or figure of the paper; subclass, fill in, decorate with `@register`.

    Attributes:
        order: where it stands among the others.
        name: what `spartan paper` calls it.
        title: one line.
        where: in the paper.
        kind: "exact" needs no training and gives the same on every machine; "measured" shows stored measurements;
            "trained" shows stored results of runs.
        needs: figures of a stored result that it shows; results of before may lack some.
        makes: how the results of a measured exhibit are made.
    """

    order: ClassVar[int]
    name: ClassVar[str]
    title: ClassVar[str]
    where: ClassVar[str]
    kind: ClassVar[Literal["exact", "measured", "trained"]]
    needs: ClassVar[tuple[str, ...]] = ("top1",)
    makes: ClassVar[str] = ""

    def experiments(self, scale: Scale) -> list[Experiment]:
        """The runs it shows, in an order that gives most first."""
        return []

    @abstractmethod
    def show(self, results: Results) -> Shown:
        """The exhibit from the results there are; those that are not there are left blank."""


@dataclass(frozen=True)
class Made:
    """An exhibit, its files, and what is missing."""

    shown: Shown
    files: Sequence[Path] = ()
    missing: Sequence[Experiment] = field(default_factory=list)


E = TypeVar("E", bound=type[Exhibit])
_EXHIBITS: dict[str, Exhibit] = {}


def register(cls: E) -> E:
    """Class decorator: makes an exhibit known by its name."""
    _EXHIBITS[cls.name] = cls()
    return cls


def exhibits() -> Iterator[Exhibit]:
    """Every exhibit: exact ones, measured ones, trained ones, each in the order of the paper."""
    # Each is a file of its own, which registers it when it is imported.
    from spartan.app.paper import exhibits as _  # noqa: F401

    yield from sorted(_EXHIBITS.values(), key=lambda one: one.order)


def find(name: str) -> Exhibit:
    """The exhibit of this name, or an error that says which was probably meant."""
    found = {one.name: one for one in exhibits()}
    if name not in found:
        known = ["list", "all", "page", *found]
        raise ValueError(f"paper: {name!r} is no exhibit{nearest(name, known)}; accepted: {', '.join(known)}")
    return found[name]


def check_scale(scale: str) -> Scale:
    """The scale of this name."""
    for known in SCALES:
        if scale == known:
            return known
    raise ValueError(f"--scale: {scale!r}{nearest(scale, SCALES)}; one of {', '.join(SCALES)} is needed")


def wanted(some: Iterable[Exhibit], scale: Scale) -> dict[Experiment, set[str]]:
    """The runs that exhibits show, each once, with the figures that they show of it."""
    found: dict[Experiment, set[str]] = {}
    for exhibit in some:
        for experiment in exhibit.experiments(scale):
            found.setdefault(experiment, set()).update(exhibit.needs)
    return found


def show(exhibit: Exhibit, results: Results) -> Shown:
    """An exhibit from the results there are; runs on digits judge no claim about networks."""
    shown = exhibit.show(results)
    if exhibit.kind != "trained" or results.scale != "tiny":
        return shown
    return replace(shown, claims=[replace(claim, verdict="not testable at this scale") for claim in shown.claims])


def file_stem(exhibit: Exhibit, scale: Scale) -> str:
    """What an exhibit's files are called, without what follows the dot."""
    return f"{exhibit.name}-{scale}" if exhibit.kind == "trained" else exhibit.name


def make(exhibit: Exhibit, results: Results, out: Path | None) -> Made:
    """Show an exhibit and, with a folder to put them in, write its files."""
    missing = results.missing(wanted([exhibit], results.scale))
    shown, files = show(exhibit, results), []
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        stem = file_stem(exhibit, results.scale)
        if shown.draw is not None:  # first: it may lack matplotlib
            files += write_figure(shown.draw, out / stem)
        for number, table in enumerate(shown.tables, 1):
            part = stem if len(shown.tables) == 1 else f"{stem}-{number}"
            for suffix, text in ((".md", table.markdown()), (".csv", table.csv())):
                files.append(out / f"{part}{suffix}")
                files[-1].write_text(text, "utf-8")
    return Made(shown, files, missing)


def missing_line(exhibit: Exhibit, made: Made, scale: Scale) -> str:
    """What is not stored, and the command that makes it; empty where all is there."""
    if not made.missing:
        return ""
    count, whole = len(made.missing), len(wanted([exhibit], scale))
    what = f"{count} of {whole} runs are" if whole > 1 else "its one run is"
    return (
        f"{what} not stored at scale {scale}; spartan paper {exhibit.name} --scale {scale} --rerun trains "
        f"{'them' if count > 1 else 'it'} ({estimate(scale, made.missing)})"
    )
