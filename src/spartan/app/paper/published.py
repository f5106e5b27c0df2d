"""The paper's printed figures, as data: published.csv names the table that each comes from."""

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Printed:
    """One figure of the paper: its mean and, where there is one, its standard deviation."""

    value: float
    std: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")


@cache
def _all() -> dict[tuple[str, str, str, str], Printed]:
    text = (resources.files("spartan.app.paper") / "published.csv").read_text("utf-8")
    return {
        (row["table"], row["row"], row["epochs"], row["column"]): Printed(
            float(row["value"]), float(row["std"]) if row["std"] else None
        )
        for row in csv.DictReader(text.splitlines())
    }


def printed(table: str, row: str, epochs: int | str, column: str) -> Printed | None:
    """A figure of a table, or None where the paper has a dash.

    Example:
        >>> str(printed("Table 2", "Spartan", 100, "95%"))
        '74.68 ± 0.24'
    """
    return _all().get((table, row, str(epochs), column))


def rows(table: str) -> dict[tuple[str, str, str], Printed]:
    """All figures of a table, by row, epochs and column, in the paper's order."""
    return {key[1:]: figure for key, figure in _all().items() if key[0] == table}
