"""Saves and loads packed files: a model in one safetensors file, close to the information bound, checked when it is read."""

from spartan.files.inspect import inspect
from spartan.files.load import load, read
from spartan.files.pack import save

__all__ = ["inspect", "load", "read", "save"]
