"""Spartan in other people's training frameworks: a file for each. A framework is imported when its file is."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from spartan import zoo


@contextmanager
def importing(extra: str, *frameworks: str) -> Iterator[None]:
    """Around the import of one of these frameworks: if there is none, the error names the extra that brings it."""
    if importlib.util.find_spec("torchvision") is not None:
        zoo.torchvision()  # frameworks import it too, and know of no CPU build of torch beside it
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in frameworks:
            raise
        raise ModuleNotFoundError(
            f"spartan.integrations.{extra} needs {' or '.join(frameworks)}, which is not installed: "
            f"pip install 'spartan-sparsity[{extra}]'",
            name=error.name,
        ) from None
