"""`spartan export` writes a trained model to one small file, and to ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from spartan.app.bench import ONNX, check_installed, onnx_runtime, write_onnx
from spartan.app.commands.options import RecipeOfFile, SetsOfFile, Target
from spartan.app.terminal import status_line
from spartan.app.trained import Trained, find_trained
from spartan.files import read, save

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export(
    target: Target,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write.  [default: NAME.safetensors, here]")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="fp32|bf16|fp16", help="Round the values to this type.  [default: as they are]"),
    ] = None,
    onnx: Annotated[
        Path | None, typer.Option(metavar="FILE.onnx", help="Write ONNX as well, and check it in ONNX Runtime.")
    ] = None,
    recipe: RecipeOfFile = None,
    sets: SetsOfFile = None,
) -> None:
    """Write a trained model to one small file.

    The file is as small as the weights allow: zeros take next to no space. Any safetensors reader opens it, and
    spartan.load("FILE") gives the model back, bit for bit, without a recipe. ONNX files hold dense float32 tensors, zeros
    included, for other runtimes.

    \b
    spartan export runs/digits-spartan-0.95-seed0                 writes digits-spartan-0.95-seed0.safetensors
    spartan export runs/imp --dtype bf16 --out small.safetensors  values in 16 bits
    spartan export runs/imp --onnx imp.onnx
    spartan export dense.safetensors --recipe cifar10-wrn22       a plain file, packed: dense-packed.safetensors
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype: {dtype!r}; one of {', '.join(DTYPES)} is needed")
    for option, path in (("--out", out), ("--onnx", onnx)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{option}: {path} is a folder" if path.is_dir() else f"{option}: no folder {path.parent}")
    if onnx is not None:
        check_installed("--onnx", ONNX)
    with status_line(f"reading {target}"):
        trained = find_trained(target, recipe, sets or ())
    kind = getattr(torch, DTYPES[dtype]) if dtype else None
    suffix = ("" if target.is_dir() else "-packed") + (f"-{dtype}" if dtype else "")
    out = out or Path(f"{trained.name}{suffix}.safetensors")
    if out.exists() and out.samefile(trained.path):
        raise ValueError(f"--out: {out} is the file to export; choose another name")
    with status_line("packing"):
        size = save(trained.model, out, kind, architecture=trained.reference)
        stored = read(out)
    for name, tensor in trained.model.state_dict().items():
        cast = tensor.to(kind) if kind is not None and tensor.is_floating_point() else tensor
        if not torch.equal(stored[name], cast):
            raise RuntimeError(f"{out}: {name} does not come back as it was; please report the model")
    dense = trained.dense_bytes
    rounded = f", rounded to {DTYPES[dtype]}" if dtype else ""
    typer.echo(f"model    {trained.reference['model']}, {trained.sparsity:.2%} of the weights are zero")
    typer.echo(f"dense    {dense:,} bytes")
    typer.echo(f"packed   {size:,} bytes, {dense / size:.1f} times smaller{rounded}; read back and compared")
    typer.echo(f"file     {out}")
    if onnx is not None:
        typer.echo(f"onnx     {_export_onnx(trained, onnx)}")
    typer.echo(f"next     spartan bench {target}, or in Python: spartan.load({str(out)!r})")


def _export_onnx(trained: Trained, path: Path) -> str:
    """Write it, and run it beside torch."""
    with status_line("writing ONNX"):
        write_onnx(trained.model, path, trained.noise(2))
        x = trained.noise(7)
        with torch.inference_mode():
            expected = trained.model(x)
        got = onnx_runtime(path)(x)
    gap, scale = float((got - expected).abs().max()), float(expected.abs().max())
    if got.shape != expected.shape or not gap <= 1e-4 * max(1.0, scale):
        raise RuntimeError(
            f"--onnx: {path} gives other answers in ONNX Runtime than in torch (by {gap:.2g}); do not use it"
        )
    return f"{path}, {path.stat().st_size:,} bytes; ONNX Runtime and torch agree within {gap:.0e}"
