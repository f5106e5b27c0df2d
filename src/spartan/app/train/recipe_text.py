"""Reads the text of recipes: YAML of plain values, within limits of size, so that any text is read soon or refused."""

import math
import re
from pathlib import Path
from typing import Any

import yaml

from spartan.wording import one_line, shortened

# A recipe with every key has 2 KB, 70 values and three levels.
LARGEST_FILE = 1 << 20
MOST_VALUES = 10_000
DEEPEST = 20
LARGEST_NUMBER = 1 << 63  # what torch can count to

_KINDS = ("null", "bool", "int", "float", "str", "seq", "map", "merge")
_TAG = "tag:yaml.org,2002:"


class RecipeError(ValueError):
    """A recipe that cannot be run; the text says which key, what was given and what is accepted."""


class _Loader(yaml.SafeLoader):
    """Reads YAML without its numbers to the base 60 (2:4 is text, not 124), dates and sets, and without surprises.

    A key that is there twice, an alias inside of what it stands for, and more values or levels than any recipe has are
    errors. Aliases count as all that they stand for: a few lines of them can be billions of values.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._levels = 0
        self._values = 0
        self._sizes: dict[yaml.Node, int] = {}  # of what is complete: the values in it

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias = self.check_event(yaml.AliasEvent)
        before, mark = self._values, self.peek_event().start_mark
        self._levels += 1
        if self._levels > DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"more than {DEEPEST} levels, one inside the other", problem_mark=mark)
        node: Any = super().compose_node(parent, index)
        self._levels -= 1
        if node not in self._sizes and alias:
            raise yaml.MarkedYAMLError(problem="an alias (*) inside of what it stands for", problem_mark=mark)
        self._values += self._sizes[node] if alias else 1
        if self._values > MOST_VALUES:
            how = ", aliases (*) counted in full" if alias else ""
            raise yaml.MarkedYAMLError(problem=f"more than {MOST_VALUES:,} values{how}", problem_mark=mark)
        self._sizes.setdefault(node, self._values - before)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _TAG + "merge":
                if key.value in lines:
                    problem = f"the key {shortened(key.value)} is there twice, first in line {lines[key.value]}"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                lines[key.value] = key.start_mark.line + 1
        return node

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """A number; text where it has a colon."""
        text = self.construct_scalar(node)
        if ":" in text:
            return text
        if len(text) < 400 or "." in text:
            value = yaml.SafeLoader.yaml_constructors[node.tag](self, node)
            if is_small(text, value):
                return value
        raise yaml.MarkedYAMLError(problem=too_large(text), problem_mark=node.start_mark)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag.removeprefix(_TAG) in _KINDS]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix(_TAG) in _KINDS
}
for _kind in ("int", "float"):
    _Loader.add_constructor(_TAG + _kind, _Loader.construct_number)


def is_small(text: str, value: float) -> bool:
    """Whether a number is one that can be counted with; infinity is, where it is called by its name."""
    if isinstance(value, int):
        return abs(value) < LARGEST_NUMBER
    return not math.isinf(value) or re.search(r"\d", text) is None


def too_large(text: str) -> str:
    """What to say of a number that is not."""
    return f"{shortened(text)} is too large a number"


def parse_yaml(text: str, of: str) -> Any:
    """What YAML says, as recipes are read; RecipeError in a line, that begins with what the text is of, where it cannot."""
    return _read(text, of, _Loader.get_single_data)


def compose_yaml(text: str, of: str) -> Any:
    """The nodes of YAML, with the places where they stand; RecipeError likewise."""
    return _read(text, of, _Loader.get_single_node)


def _read(text: str, of: str, how: Any) -> Any:
    try:
        return how(_Loader(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise RecipeError(f"{of} cannot be read: {one_line(Exception(error.problem or 'not YAML'))}{where}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{of} cannot be read: {shortened(one_line(error), 200)}") from None


def read_text(path: Path) -> str:
    """The text of a recipe file; RecipeError where it is none."""
    with path.open("rb") as file:
        found = file.read(LARGEST_FILE + 1)
    if len(found) > LARGEST_FILE:
        raise RecipeError(f"{path} has more than {LARGEST_FILE:,} bytes; no recipe is that long")
    if found[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise RecipeError(f"{path} is UTF-16 text; save it as UTF-8")
    try:
        text = found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte 0x{found[error.start]:02x} in line {found.count(10, 0, error.start) + 1}"
        raise RecipeError(f"{path} is not UTF-8 text ({where}); save it as UTF-8") from None
    if "\0" in text:
        raise RecipeError(f"{path} is no text: it holds NUL bytes; a recipe is a YAML file, saved as UTF-8")
    return text
