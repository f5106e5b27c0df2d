"""Describes a packed file: what is in it, and how near its size is to the information bound."""

import json
import math
import os
from contextlib import suppress
from dataclasses import replace

from spartan.files import codes
from spartan.files.load import Spec, open_file
from spartan.wording import aligned, printable


def bound_bytes(spec: Spec) -> float:
    """The information bound of a stored tensor in bytes: over its units if it is packed, its own size if it is dense.

    Values count in full: where their exponents are coded, the tensor can be smaller. N:M keeps n of every m: log₂ C(m,
    n) bits a group, which is less than what H of its density gives.
    """
    bits = 8 * spec.dtype.itemsize
    if spec.code is None:
        return float(spec.nbytes)
    if spec.signs is not None:  # and which of the zeros are −0.0
        rest = max(spec.count - spec.kept, spec.signs[0])
        return bound_bytes(replace(spec, signs=None)) + codes.entropy(rest, spec.signs[0]) / 8
    if spec.code.name == "nm":
        groups = spec.count // spec.code.m
        return (spec.kept * bits + groups * math.log2(math.comb(spec.code.m, spec.code.n))) / 8
    unit = spec.code.h * spec.code.w
    return codes.bound(spec.count // unit, spec.kept // unit, unit * bits) / 8


def inspect(path: str | os.PathLike[str]) -> str:
    r"""A page of text about a packed file, whose checksum and header have been checked; ValueError if it is damaged.

    Example:
        >>> import tempfile
        >>> from spartan.files import save
        >>> model = spartan.prune(torch.nn.Linear(1000, 1000), sparsity=0.95)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     size = save(model, f"{folder}/model.safetensors")
        ...     text = inspect(f"{folder}/model.safetensors")
        >>> print(text.split("\n\n")[1])
        tensor    shape      dtype    code      kept    bytes    bound    over
        weight    1000×1000  float32  gaps 4  5.000%  193,881  235,800  -17.8%
        1 others  1,000                                 4,000    4,000   +0.0%
    """
    contents = open_file(path)
    container, specs = contents.container, contents.specs
    dense = sum(spec.nbytes for spec in specs.values())
    bound = sum(map(bound_bytes, specs.values()))
    reference, over = contents.architecture, container.size / max(1.0, bound) - 1
    larger, version = "larger" if over > 0 else "smaller", container.metadata["spartan.version"]
    sparsity = "not named"
    with suppress(KeyError, ValueError):
        zeros = float(container.metadata["spartan.sparsity"])
        sparsity = f"{zeros:.4%} of the weights in tensors of 2 or more dimensions"
    facts = [
        ("file", f"{path}: {container.size:,} bytes, format version {version}, checksum good"),
        ("architecture", json.dumps(reference) if reference else "not named: load needs the model"),
        ("pattern", container.metadata.get("spartan.pattern", "not named")),
        ("sparsity", sparsity),
        ("dense", f"{dense:,} bytes, {dense / container.size:.2f} times the file"),
        ("bound", f"{bound:,.0f} bytes if values are random bits; the file is {abs(over):.2%} {larger}"),
    ]
    if contents.narrowed is not None:
        facts.insert(2, ("narrowed", f"what is dead has been cut out; other sizes in {len(contents.narrowed)} modules"))
    facts += [("tied", f"{alias} is {name}") for alias, name in contents.aliases.items()]
    rows = [["tensor", "shape", "dtype", "code", "kept", "bytes", "bound", "over"]]
    small: list[Spec] = []
    for name, spec in specs.items():
        if len(spec.shape) < 2:
            small.append(spec)
            continue
        kept = f"{spec.kept / max(1, spec.count):.3%}"
        shape = "×".join(map(str, spec.shape))
        code = "dense" if spec.code is None else str(spec.code) if spec.kept else "zero"
        rows.append([name, shape, str(spec.dtype).removeprefix("torch."), code, kept, *_sizes([spec])])
    if small:
        count = f"{sum(spec.count for spec in small):,}"
        rows.append([f"{len(small)} others", count, "", "", "", *_sizes(small)])
    # Names come from the file: nothing of them may steer a terminal, or pass for a line of this page.
    lines = [f"{key:<13} {value}" for key, value in facts] + ["", *aligned(rows, left=4)]
    return "\n".join(map(printable, lines))


def _sizes(specs: list[Spec]) -> list[str]:
    stored, bound = sum(spec.stored_bytes for spec in specs), sum(map(bound_bytes, specs))
    return [f"{stored:,}", f"{bound:,.0f}", f"{stored / bound - 1:+.1%}" if bound else ""]
