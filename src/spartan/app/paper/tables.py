"""Tables of text: as Markdown, as CSV and in the terminal."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

NONE = "–"


@dataclass(frozen=True)
class Table:
    """A table with a caption; every cell is text."""

    caption: str
    header: Sequence[str]
    cells: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """With the caption above, in bold."""
        lines = [self.header, ["---"] * len(self.header), *self.cells]
        body = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
        return f"**{self.caption}**\n\n{body}"

    def csv(self) -> str:
        """The header and the cells."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.header, *self.cells])
        return text.getvalue()


def text_of(value: object) -> str:
    """A cell: a dash where there is nothing."""
    return NONE if value is None else str(value)
