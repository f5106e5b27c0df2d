"""Patterns: the unit that lives or dies together, one file each. A new file here is found by itself."""

import importlib
import pkgutil

from spartan.problem.patterns.base import Pattern, Place, check_pattern, read_pattern
from spartan.problem.patterns.unstructured import Unstructured

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Pattern", "Place", "Unstructured", "check_pattern", "read_pattern"]
