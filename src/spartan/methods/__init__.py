"""The methods: one file each. A new file here is found by itself; nothing else needs to change."""

import importlib
import pkgutil
import sys
import types
from collections.abc import Iterator

from spartan.methods.base import Method
from spartan.methods.registry import Entry, as_method, check_together, entries, register

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


class Methods(types.ModuleType):
    """`spartan.methods` is this package and, called, the list of what it holds."""

    def __call__(self) -> Iterator[Entry]:
        """Every registered method: name, year, one line, needs, sparse_from, reference."""
        return entries()

    def __getattr__(self, name: str) -> type[Method]:
        for entry in entries():
            if entry.cls.__name__ == name:
                return entry.cls
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


package: Methods = sys.modules[__name__]  # type: ignore[assignment]
package.__class__ = Methods

__all__ = ["Entry", "Method", "as_method", "check_together", "entries", "register"]
