"""Tells what `shrink` has done, and what it could not do and why."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from spartan.shrink.axes import WeightedSum
from spartan.shrink.parts import Parts
from spartan.shrink.rules.base import Survey
from spartan.shrink.trace import Traced
from spartan.wording import aligned


@dataclass(frozen=True)
class Cut:
    """A tensor that got smaller."""

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class Stays:
    """Outputs or inputs of a weight that are all zero and stay."""

    name: str
    count: int
    side: str  # "outputs" or "inputs"
    why: str

    def __str__(self) -> str:
        return f"{self.count:,} {self.side} of {self.name}: all zero, but {self.why}"


@dataclass(frozen=True)
class Refused:
    """Tensors that could be smaller, but for the model's own code."""

    names: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        names = ", ".join(self.names[:4]) + (", …" if len(self.names) > 4 else "")
        return f"{names}: could be smaller, but {self.why}"


@dataclass(frozen=True)
class ShrinkReport:
    """What was cut out of a model, and what could not be. `print` shows it all."""

    before: int  # parameters
    after: int
    cuts: tuple[Cut, ...]
    stays: tuple[Stays, ...]
    refused: tuple[Refused, ...]

    def __str__(self) -> str:
        lines = [f"parameters  {self.before:,} → {self.after:,} ({self.after / max(1, self.before):.1%})"]
        if self.cuts:
            rows = [(cut.name, "×".join(map(str, cut.before)), "×".join(map(str, cut.after))) for cut in self.cuts]
            lines += ["", *aligned([("tensor", "before", "after"), *rows], left=1)]
        if kept := self.kept():
            lines += ["", "what stays:", *(f"- {told}" for told in kept)]
        return "\n".join(lines)

    def kept(self) -> list[str]:
        """What could not be cut: a sentence for each reason."""
        found: dict[str, list[str]] = {}
        for each in self.stays:
            found.setdefault(each.why, []).append(f"{each.count:,} {each.side} of {each.name}")
        return [str(told) for told in self.refused] + [
            f"{', '.join(which)}: all zero, but {why}" for why, which in found.items()
        ]


def report_of(found: Survey, traced: Traced, before: Parts, after: Parts, refused: Mapping[int, str]) -> ShrinkReport:
    """The report.

    Args:
        found: the survey, after it was decided what stays.
        traced: the graph.
        before: the tensors of the model given.
        after: those of the narrower one.
        refused: why nothing was cut from an axis that could be shorter.
    """
    pairs = [(name, tuple(t.shape), tuple(after.tensors[name].shape)) for name, t in before.tensors.items()]
    stays = [
        told for rule in found.ties.rules if isinstance(rule, WeightedSum) for told in _zeros_left(rule, found, traced)
    ]
    by_reason: dict[str, list[str]] = {}
    for name, axes in found.leaves.items():
        for why in {refused[id(axis.root)] for axis in axes if id(axis.root) in refused}:
            by_reason.setdefault(why, []).append(name)
    return ShrinkReport(
        before=before.parameters,
        after=after.parameters,
        cuts=tuple(Cut(name, old, new) for name, old, new in pairs if old != new),
        stays=tuple(dict.fromkeys(stays)),
        refused=tuple(Refused(tuple(names), why) for why, names in by_reason.items()),
    )


def _zeros_left(reading: WeightedSum, found: Survey, traced: Traced) -> list[Stays]:
    """Outputs and inputs of a weight that are all zero and stay."""
    name = traced.leaves.get(reading.weight_node)
    if name is None:
        return []
    weight = reading.turned(reading.weight)
    nonzero = (weight != 0).reshape(*weight.shape[:2], -1).any(2).cpu()
    dead_outputs = ~nonzero.any(1)
    dead_inputs = ~nonzero.reshape(reading.groups, -1, weight.shape[1]).any(1).reshape(-1)
    told = []
    for side, axis, dead in (("outputs", reading.outputs, dead_outputs), ("inputs", reading.inputs, dead_inputs)):
        why = torch.where(dead, axis.root.why, 0)
        for other, rim, reason in found.ties.borders:
            if side == "outputs" and other.root is axis.root:
                why = torch.where(rim & (why > 0), reason, why)
        for number in why.unique().tolist():
            if number:
                told.append(Stays(name, int((why == number).sum()), side, found.ties.reasons.text(number)))
    return told
