"""`spartan bench` measures size, speed and accuracy of a sparse model beside the dense one."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from spartan.app import bench as measuring
from spartan.app.commands.options import RecipeOfFile, SetsOfFile, Target
from spartan.app.terminal import print_table, status_line
from spartan.app.trained import find_trained
from spartan.inference.cpu.library import status


def bench(
    target: Target,
    batch: Annotated[str, typer.Option(metavar="N,M,…", help="How many images at once.")] = "1,8",
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many threads.  [default: one a core]")
    ] = None,
    images: Annotated[
        int, typer.Option(metavar="N", min=0, help="Compare answers on so many test images at most; 0: on none.")
    ] = 10_000,
    compiled: Annotated[bool, typer.Option("--compile", help="Also time the dense model under torch.compile.")] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also time the dense model in ONNX Runtime.")] = False,
    openvino: Annotated[bool, typer.Option("--openvino", help="Also time the dense model in OpenVINO.")] = False,
    recipe: RecipeOfFile = None,
    sets: SetsOfFile = None,
) -> None:
    """Measure size, speed and accuracy, before and after.

    Before: dense tensors and torch's own layers. After: the packed file, and spartan's kernels for each layer where they are
    faster on this machine. On the CPU, in float32; a time is the least of many calls, and the contenders take turns. Close
    other programs first.

    \b
    spartan bench runs/digits-spartan-0.95-seed0
    spartan bench runs/imp --batch 1,8,64 --threads 1 --compile --onnx
    spartan bench small.safetensors --recipe digits         the recipe says on which images to compare
    """
    batches = _batches(batch)
    wanted = {measuring.COMPILED: compiled, measuring.ONNX: onnx, measuring.OPENVINO: openvino}
    rivals = [name for name, asked in wanted.items() if asked]
    for name in rivals:
        if name in measuring.NEEDS:
            measuring.check_installed("--onnx" if name == measuring.ONNX else "--openvino", name)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        with status_line(f"reading {target}") as tell:
            trained = find_trained(target, recipe, sets or ())
            tell("loading kernels (the first time ever: compiling them)")
            count = torch.get_num_threads()
            about = f"{count} thread{'s' * (count > 1)}, torch {torch.__version__}, {status()}"
            result = measuring.bench(trained, batches, rivals, images, tell)
    finally:
        torch.set_num_threads(before)
    typer.echo(f"{trained.name}: {trained.reference['model']}, {trained.sparsity:.2%} zeros, {about}\n")
    _print_result(result)
    if result.answers is None and images:
        typer.echo("\ntop-1 is not measured: --recipe RECIPE says on which images")


def _print_result(result: measuring.Result) -> None:
    batches, answers = list(result.seconds), result.answers
    rows = []
    for name in result.seconds[batches[0]]:
        ours = name == measuring.OURS
        size = result.packed_bytes if ours else result.dense_bytes
        smaller = f" ({result.dense_bytes / size:.1f}x smaller)" if ours else ""
        cells = [f"{1e3 * times[name]:.3g} ms" for times in result.seconds.values()]
        if name != measuring.EAGER:
            ratios = [times[measuring.EAGER] / times[name] for times in result.seconds.values()]
            cells = [f"{cell} ({ratio:.2f}x)" for cell, ratio in zip(cells, ratios, strict=True)]
        # The dense model is one and the same, whoever runs it.
        top1 = "" if answers is None else f"{answers.after if ours else answers.before:.2%}"
        rows.append([name, f"{size:,}{smaller}", *cells, top1])
    print_table(["", "bytes", *(f"batch {n}" for n in batches), "top-1" if answers else ""], rows)
    if answers is not None:
        part = "" if answers.images == answers.of else f" (of {answers.of:,})"
        typer.echo(
            f"\nthe same answer on {answers.same:,} of {answers.images:,} test images{part}; "
            f"scores differ by {answers.gap:.1e} at most"
        )
    typer.echo(
        f"\nwhat runs each layer: torch (dense) or a sparse kernel; the times are one layer's, at batch {batches[-1]}"
    )
    by_layer = zip(*result.kernels.values(), strict=True)
    layers = [[lines[0].layer, *(line.kernel for line in lines), lines[-1].why] for lines in by_layer]
    print_table(["layer", *(f"batch {n}" for n in batches), "why"], layers)


def _batches(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or len(set(found)) < len(found):
        raise ValueError(f"--batch: {text!r}; numbers from 1 on with commas between them are needed, such as 1,8")
    return found
