"""Smaller on disk, faster to run: packed files, and models whose layers run sparse kernels."""

from spartan.export.inspect import inspect
from spartan.export.load import load, read
from spartan.export.pack import save

__all__ = ["inspect", "load", "read", "save"]
