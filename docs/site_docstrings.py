"""Docstrings here say "Example:"; mkdocstrings knows the section as "Examples:", and shows only that as code."""

import re
from typing import Any

import griffe


class ExamplesSection(griffe.Extension):
    """Renames the section while the reference is made."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Every object that was found."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
