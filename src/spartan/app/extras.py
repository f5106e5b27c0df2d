"""Which packages each extra of ours brings, from the metadata of the installed package, and which of them are here."""

import functools
import importlib.util
import re
from importlib import metadata

NAME = "spartan-sparsity"
# Packages that are imported by another name than they are installed by.
MODULES = {"pyyaml": "yaml", "scikit-learn": "sklearn", "pillow": "PIL"}
# For those who work on the library itself.
_OWN = {"dev", "docs"}


@functools.cache
def extras() -> dict[str, list[str]]:
    """The packages of each extra that a user may want, by the name that pip knows; {} where we are not installed."""
    found: dict[str, list[str]] = {}
    try:
        lines = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        return {}
    for line in lines:
        package = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if package and extra and extra[1] not in _OWN and package[0] != NAME:
            found.setdefault(extra[1], []).append(package[0])
    return found


def module_of(package: str) -> str:
    """The name by which a package is imported.

    Example:
        >>> module_of("pyyaml"), module_of("timm")
        ('yaml', 'timm')
    """
    return MODULES.get(package.lower(), package.replace("-", "_"))


def is_installed(package: str) -> bool:
    """Whether Python finds the module of a package; it is not imported."""
    return importlib.util.find_spec(module_of(package)) is not None


def how_to_get(module: str) -> str:
    """The command that brings a module, where an extra of ours has it; "" else.

    Example:
        >>> how_to_get("no_such_module")
        ''
    """
    having = [extra for extra, names in extras().items() if module in map(module_of, names)]
    return f"pip install '{NAME}[{having[0]}]'" if having else ""
