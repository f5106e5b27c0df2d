"""The commands about trained models: `export`, `inspect` and `bench`."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from spartan.app.commands import RecipeOfFile, SetsOfFile, Target
from spartan.wording import alike_together

# What runs a command is imported by it, so that help needs neither torch nor the extras.
if TYPE_CHECKING:
    from spartan.app.bench import Result
    from spartan.app.trained import Trained
    from spartan.shrink.report import ShrinkReport

_REASONS = 8  # of what is not cut, how many to print
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export(
    target: Target,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="The file to write.  [default: NAME.safetensors, here]")
    ] = None,
    dtype: Annotated[
        str | None, Option(metavar="fp32|bf16|fp16", help="Round the values to this type.  [default: as they are]")
    ] = None,
    onnx: Annotated[
        Path | None, Option(metavar="FILE.onnx", help="Write ONNX as well, and check it in ONNX Runtime.")
    ] = None,
    shrink: Annotated[
        bool, Option("--shrink", help="Cut channels, heads and columns that are all zero out of the model first.")
    ] = False,
    recipe: RecipeOfFile = None,
    sets: SetsOfFile = None,
) -> None:
    """Write a trained model to one small file.

    The file is as small as the weights allow: zeros take next to no space. Any safetensors reader opens it, and
    spartan.load("FILE") gives the model back, bit for bit, without a recipe. ONNX files hold dense float32 tensors,
    zeros included, for other runtimes. With --shrink the model itself gets narrower, with the same outputs: fewer
    operations in any runtime.

    \b
    spartan export runs/digits-spartan-0.95-seed0                 writes digits-spartan-0.95-seed0.safetensors
    spartan export runs/imp --dtype bf16 --out small.safetensors  values in 16 bits
    spartan export runs/imp --onnx imp.onnx
    spartan export runs/channels --shrink                         narrower: channels-shrunk.safetensors
    spartan export dense.safetensors --recipe cifar10-wrn22       a plain file, packed: dense-packed.safetensors
    """
    import torch

    import spartan
    from spartan.app.bench import check_installed
    from spartan.app.terminal import status_line
    from spartan.app.trained import find_trained
    from spartan.files import read, save

    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype: {dtype!r}; one of {', '.join(DTYPES)} is needed")
    for option, path in (("--out", out), ("--onnx", onnx)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{option}: {path} is a folder" if path.is_dir() else f"{option}: no folder {path.parent}")
    if onnx is not None:
        check_installed("--onnx")
    with status_line(f"reading {target}"):
        trained = find_trained(target, recipe, sets or ())
    kind = getattr(torch, DTYPES[dtype]) if dtype else None
    suffix = "-shrunk" if shrink else "" if target.is_dir() else "-packed"
    suffix += f"-{dtype}" if dtype else ""
    out = out or Path(f"{trained.name}{suffix}.safetensors")
    if out.exists() and out.samefile(trained.path):
        raise ValueError(f"--out: {out} is the file to export; choose another name")
    dense, told = trained.dense_bytes, None
    if shrink:
        with status_line("cutting out what is dead"), warnings.catch_warnings(action="ignore"):
            smaller, told = spartan.shrink(trained.model, trained.noise(2), report=True)
            trained = replace(trained, model=smaller)
    with status_line("packing"):
        size = save(trained.model, out, kind, architecture=trained.reference)
        stored = read(out)
    for name, tensor in trained.model.state_dict().items():
        cast = tensor.to(kind) if kind is not None and tensor.is_floating_point() else tensor
        if not torch.equal(stored[name], cast):
            raise RuntimeError(f"{out}: {name} does not come back as it was; please report the model")
    rounded = f", rounded to {DTYPES[dtype]}" if dtype else ""
    typer.echo(f"model    {trained.reference['model']}, {trained.sparsity:.2%} of the weights are zero")
    typer.echo(f"dense    {dense:,} bytes")
    if told is not None:
        _print_shrunk(told)
    typer.echo(f"packed   {size:,} bytes, {dense / size:.1f} times smaller{rounded}; read back and compared")
    typer.echo(f"file     {out}")
    if onnx is not None:
        typer.echo(f"onnx     {_export_onnx(trained, onnx)}")
    typer.echo(f"next     spartan bench {out if shrink else target}, or in Python: spartan.load({str(out)!r})")


def _print_shrunk(report: "ShrinkReport") -> None:
    from spartan.wording import shortened

    cuts, kept = len(report.cuts), report.kept()
    what = f"{report.before:,} → {report.after:,} parameters; {cuts} tensors are smaller" if cuts else "nothing is dead"
    typer.echo(f"shrunk   {what}")
    for told in kept[:_REASONS]:
        typer.echo(f"stays    {shortened(told, most=240)}")
    if len(kept) > _REASONS:
        typer.echo(
            f"stays    and more, for {len(kept) - _REASONS} other reasons: spartan.shrink(…, report=True) lists all"
        )


def _export_onnx(trained: "Trained", path: Path) -> str:
    """Write it, and run it beside torch."""
    import torch

    from spartan.app.bench import onnx_runtime, write_onnx
    from spartan.app.terminal import status_line

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


def inspect(
    target: Target,
    kernels: Annotated[
        bool, Option("--kernels", help="And which kernel runs each layer on this machine, and why.")
    ] = False,
    recipe: RecipeOfFile = None,
) -> None:
    """Show what is in a packed file.

    For every tensor: its shape and type, the code it is stored in, what is kept, its bytes, and how far these are from
    the information bound (kept · bits + n · H(density)). The checksum is checked. With --kernels each layer's kernels
    are timed for one image, unless they were before.

    \b
    spartan inspect model.safetensors
    spartan inspect runs/imp --kernels
    """
    import spartan
    from spartan.app.terminal import print_table, status_line
    from spartan.app.trained import find_trained
    from spartan.files.inspect import inspect as describe
    from spartan.inference.cpu.library import status

    path = target / "model.safetensors" if target.is_dir() else target
    if not path.is_file():
        what = "finished run in this folder" if target.is_dir() else "such file"
        raise ValueError(f"{target}: there is no {what}")
    typer.echo(describe(path))
    if not kernels:
        return
    trained = find_trained(target, recipe)
    with status_line("timing kernels (the first time ever: compiling them)"):
        fast = spartan.accelerate(trained.model, example_inputs=trained.noise(1))
    typer.echo(f"\nkernels       {status()}")
    rows = [[line.layer, line.kernel, line.why] for line in spartan.explain(fast)]
    print_table(["layer", "kernel", "why"], alike_together(rows))


def bench(
    target: Target,
    batch: Annotated[str | None, Option(metavar="N,M,…", help="How many images at once.  [default: 1,8]")] = None,
    threads: Annotated[int | None, Option(metavar="N", min=1, help="How many threads.  [default: one a core]")] = None,
    images: Annotated[
        int | None,
        Option(
            metavar="N", min=0, help="Compare answers on so many test images at most; 0: on none.  [default: 10000]"
        ),
    ] = None,
    generate: Annotated[
        str | None,
        Option(metavar="PROMPT|N", help="Tokens a second of a decoder: reads a text, or N tokens, and writes more."),
    ] = None,
    length: Annotated[
        int | None, Option(metavar="N", min=2, help="With --generate: how many tokens to write.  [default: 64]")
    ] = None,
    compiled: Annotated[bool, Option("--compile", help="Also time the dense model under torch.compile.")] = False,
    onnx: Annotated[bool, Option("--onnx", help="Also time the dense model in ONNX Runtime.")] = False,
    openvino: Annotated[bool, Option("--openvino", help="Also time the dense model in OpenVINO.")] = False,
    recipe: RecipeOfFile = None,
    sets: SetsOfFile = None,
) -> None:
    """Measure size, speed and accuracy, before and after.

    Before: dense tensors and torch's own layers. After: the packed file, and spartan's kernels for each layer where
    they are faster on this machine. On the CPU, in float32; a time is the least of many calls, and the contenders take
    turns. Close other programs first.

    \b
    spartan bench runs/digits-spartan-0.95-seed0
    spartan bench runs/imp --batch 1,8,64 --threads 1 --compile --onnx
    spartan bench small.safetensors --recipe digits         the recipe says on which images to compare
    spartan bench runs/bytes-gpt --generate "The "          tokens a second of reading a prompt, and of writing
    spartan bench llama --generate 512 --length 32          a folder that transformers wrote
    """
    import torch

    from spartan.app import bench as measuring
    from spartan.app.terminal import status_line
    from spartan.app.trained import find_trained
    from spartan.inference.cpu.library import status

    if generate is not None:
        others = {"--batch": batch, "--images": images, "--compile": compiled, "--onnx": onnx, "--openvino": openvino}
        if given := [name for name, value in others.items() if value not in (None, False)]:
            raise ValueError(f"{', '.join(given)}: --generate compares eager torch with spartan, one prompt at a time")
        _bench_generate(target, generate, length or 64, threads, recipe, tuple(sets or ()))
        return
    if length is not None:
        raise ValueError("--length: it says how many tokens --generate writes")
    batches, images = _batches(batch or "1,8"), 10_000 if images is None else images
    for option in ["--onnx"] * onnx + ["--openvino"] * openvino:
        measuring.check_installed(option)
    wanted = {measuring.COMPILED: compiled, measuring.ONNX: onnx, measuring.OPENVINO: openvino}
    rivals = [name for name, asked in wanted.items() if asked]
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


def _bench_generate(
    target: Path, prompt: str, length: int, threads: int | None, recipe: str | None, sets: tuple[str, ...]
) -> None:
    import torch

    from spartan.app import bench as measuring
    from spartan.app.generate import find_decoder
    from spartan.app.generate import generate as generate_tokens
    from spartan.app.terminal import print_table, status_line
    from spartan.inference.cpu.library import status

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        with status_line(f"reading {target}") as tell:
            decoder = find_decoder(target, recipe, sets)
            count = torch.get_num_threads()
            about = f"{count} thread{'s' * (count > 1)}, torch {torch.__version__}, {status()}"
            result = generate_tokens(decoder, prompt, length, tell)
    finally:
        torch.set_num_threads(before)
    typer.echo(f"{decoder.name}: {decoder.kind}, {decoder.sparsity:.2%} zeros, {about}\n")
    rows = []
    for name in result.prefill:
        cells = []
        for rates in (result.prefill, result.decode):
            ratio = "" if name == measuring.EAGER else f" ({rates[name] / rates[measuring.EAGER]:.2f}x)"
            cells.append(f"{rates[name]:,.4g} tokens/s{ratio}")
        rows.append([name, *cells])
    print_table(["", f"reading {result.prompt:,} tokens", f"writing {length:,}"], rows)
    dense, ours = result.written[measuring.EAGER], result.written[measuring.OURS]
    same = next((i for i, (a, b) in enumerate(zip(dense, ours, strict=True)) if a != b), length)
    told = f"the first {same:,} of {length:,} tokens are" if same < length else f"all {length:,} tokens are"
    typer.echo(f"\n{told} the same, the likeliest taken each time; keys and values of earlier tokens are kept")
    typer.echo("\nwhat runs each layer: torch (dense) or a sparse kernel; the times are the first layer's")
    layers = [[line.layer, line.kernel, line.why] for line in result.kernels]
    print_table(["layer", "kernel", "why"], alike_together(layers))


def _print_result(result: "Result") -> None:
    from spartan.app import bench as measuring
    from spartan.app.terminal import print_table

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
        what = "bytes of the test data" if answers.task == "text" else "test images"
        typer.echo(
            f"\nthe same answer on {answers.same:,} of {answers.images:,} {what}{part}; "
            f"scores differ by {answers.gap:.1e} at most"
        )
    typer.echo(
        f"\nwhat runs each layer: torch (dense) or a sparse kernel; the times are the first layer's, at batch {batches[-1]}"
    )
    by_layer = zip(*result.kernels.values(), strict=True)
    layers = [[lines[0].layer, *(line.kernel for line in lines), lines[-1].why] for lines in by_layer]
    print_table(["layer", *(f"batch {n}" for n in batches), "why"], alike_together(layers))


def _batches(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or len(set(found)) < len(found):
        raise ValueError(f"--batch: {text!r}; numbers from 1 on with commas between them are needed, such as 1,8")
    return found


COMMANDS = (export, inspect, bench)
