"""Finds the narrowest model: what the graph allows, less what the modules' own code does not bear."""

import warnings
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn

from spartan.problem.targets import unwrap
from spartan.shrink import Inputs
from spartan.shrink.axes import Axis
from spartan.shrink.check import Case, arguments_of, cases_of, check_model, why_wrong
from spartan.shrink.parts import Parts
from spartan.shrink.plan import copy_of, narrowed
from spartan.shrink.report import ShrinkReport, report_of
from spartan.shrink.rules.base import Survey
from spartan.shrink.survey import survey
from spartan.shrink.trace import Traced, trace
from spartan.wording import first_line

M = TypeVar("M", bound=nn.Module)


def cut(model: M, example_inputs: Inputs) -> tuple[M, ShrinkReport]:
    """The narrower model, and what was done; the arguments are those of `shrink`."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type(model).__name__}, not a torch.nn.Module")
    whole = unwrap(model)
    check_model(whole)
    parts = Parts.of(whole)
    inputs = arguments_of(whole, example_inputs)
    cases = cases_of(whole, inputs)
    # Of a copy that shares the tensors: what a module stores while it is traced is of no use to anybody.
    traced = trace(copy_of(whole, {id(t): t for t in parts.tensors.values()}), *inputs)
    found = survey(traced, parts)
    search = Trials(whole, traced, found, parts, cases)
    smaller = search.best()
    report = report_of(found, traced, parts, Parts.of(smaller), search.refused)
    if not report.cuts:
        why = next((f"; {told}" for told in (*report.refused, *report.stays)), "")
        warnings.warn(f"nothing can be cut out of {type(whole).__name__}{why}", stacklevel=3)
    return smaller, report  # type: ignore[return-value]


class Trials:
    """Tries what to cut. That it is dead the graph says; whether the code runs with other sizes is seen by running it."""

    def __init__(self, model: nn.Module, traced: Traced, found: Survey, parts: Parts, cases: list[Case]) -> None:
        self.model, self.traced, self.found, self.parts, self.cases = model, traced, found, parts, cases
        self.axes = {id(axis): axis for axis in found.ties.every if axis.root is axis}
        self.refused: dict[int, str] = {}  # by axis: why nothing is cut from it

    def best(self) -> nn.Module:
        """The narrowest model that passes."""
        model, why = self._try(self.axes.values())
        if model is None:
            # The last ones first: they ask for what is before them.
            self._refuse([], self.found.ties.parts()[::-1], why)
            model, why = self._try(self.axes.values())
        if model is None:
            raise RuntimeError(f"shrink can cut nothing: {why}; please report the model")
        return model

    def _try(self, allowed: Iterable[Axis]) -> tuple[nn.Module | None, str]:
        """The model if only these axes get shorter; None and what is wrong where it does not pass."""
        inside = {id(axis) for axis in allowed} - self.refused.keys()
        reasons = self.found.ties.reasons
        whole = {
            axis: reasons.number(self.refused.get(key, "they are left whole for a trial"))
            for key, axis in self.axes.items()
            if key not in inside
        }
        with torch.device("cpu"):  # whatever the default is
            self.found.ties.solve(whole)
        try:
            model = narrowed(self.model, self.traced, self.found, self.parts)
        except ValueError as error:  # a module cannot be that narrow
            return None, first_line(error)
        told = why_wrong(model, self.cases)
        return (None, told) if told else (model, "")

    def _refuse(self, good: list[list[Axis]], parts: list[list[Axis]], why: str) -> list[list[Axis]]:
        """Refuse those of the parts that cannot be cut, found by halves. Returns those that can, the good ones included.

        Args:
            good: parts that can be cut together.
            parts: those that cannot, together with these.
            why: what is wrong then.
        """
        if len(parts) == 1:
            self.refused |= {id(axis): why for axis in parts[0]}
            return good
        half = len(parts) // 2
        for these in (parts[:half], parts[half:]):
            model, told = self._try(axis for part in (*good, *these) for axis in part)
            good = self._refuse(good, these, told) if model is None else [*good, *these]
        return good
