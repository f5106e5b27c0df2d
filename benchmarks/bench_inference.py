"""Sparse inference, end to end, against the best dense of the machine.

    pip install 'spartan-sparsity[bench]'
    python benchmarks/bench_inference.py [--cases resnet50 vit16 vit32] [--batches 1 8] [--rounds 15] [--append]

Every case is a torchvision model, float32, with random weights of which all but the largest are zero. With `--load FILE`
(model.safetensors of a finished run, or what `spartan.save` wrote) the one case is the model in that file, with the masks
that it learned. "dense" are torch eager (both memory formats), torch.compile, ONNX Runtime and OpenVINO on the same weights,
all in float32 and on as many threads; "ours" is `accelerate(model)`. Contenders take turns in one process; before each turn
there is a pause, for another library's threads to stop spinning, and a call that is not timed. The least time of all rounds
counts, the median stands beside it. Outputs are compared with eager's in float64.

`--device cuda` measures on a GPU, in bfloat16, single layers and ViT-B/16 at batch 64 and 256; see inference_gpu.py.

`--parts` also prints what our model spends its time on: the time that is left without the sparse layers is a floor that no
sparse kernel can get under.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import functools
import os
import platform
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

import spartan
from spartan import Block
from spartan.files import load
from spartan.files.load import open_file
from spartan.inference import convert
from spartan.inference.cpu.library import status
from spartan.inference.onnx import export_onnx
from spartan.inference.runtime import SparseLayer
from spartan.zoo import torchvision

RESULTS = Path(__file__).parent / "inference.csv"
COLUMNS = [
    "date",
    "commit",
    "device",
    "torch",
    "case",
    "batch",
    "contender",
    "least_s",
    "median_s",
    "ratio_to_best_dense",
]
Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """A model and how it is pruned."""

    model: str
    sparsity: float
    block: int
    budget: str
    exclude: tuple[str, ...]


_HEADS = ("conv_proj*", "heads*")
CASES = {
    # The budget decides where the weights are kept, and with that the multiplications that are left.
    "resnet50": Case("resnet50", 0.95, 1, "uniform", ()),
    "resnet50-erk": Case("resnet50", 0.95, 1, "erk", ()),
    "vit16": Case("vit_b_16", 0.9, 16, "uniform", _HEADS),
    "vit32": Case("vit_b_16", 0.9, 32, "uniform", _HEADS),
    "vit64": Case("vit_b_16", 0.9, 64, "uniform", _HEADS),
    "vit": Case("vit_b_16", 0.9, 1, "uniform", _HEADS),
}


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(torchvision().models, case.model)()
    for module in model.modules():  # or an untrained residual branch or head would hide errors
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    pattern = Block(case.block, case.block) if case.block > 1 else None
    return spartan.prune(model, case.sparsity, pattern=pattern, budget=case.budget, exclude=case.exclude or None).eval()


def learned(file: str) -> tuple[nn.Module, tuple[int, ...]]:
    """The model of a packed file, in float32, and the shape of its images."""
    reference = open_file(file).architecture or {}
    return load(file, kernels="dense").float().eval(), tuple(reference.get("shape", (3, 224, 224)))


def learned_name(file: str) -> str:
    """The run's folder, or a packed file's own name."""
    path = Path(file).absolute()
    return f"{path.parent.name if path.stem == 'model' else path.stem} (learned)"


def compare(model: nn.Module, images: str, count: int = 1000) -> None:
    """Ours and the dense model on real images, enlarged: the same classes, and how far apart the logits are."""
    from train_masks import enlarged

    pixels = torch.from_numpy(numpy.load(images)["x_test"][:count])
    ours, dense = convert.accelerate(model, example_inputs=enlarged(pixels[:8], torch.device("cpu"))), model
    same, gap, scale = 0, 0.0, 0.0
    for first in range(0, count, 8):
        x = enlarged(pixels[first : first + 8], torch.device("cpu"))
        a, b = ours(x), dense(x)
        same += int((a.argmax(1) == b.argmax(1)).sum())
        gap, scale = max(gap, float((a - b).abs().max())), max(scale, float(b.abs().max()))
    print(
        f"  {count} images: top-1 equal on {same}, logits within {gap:.1e} of the dense model's (largest {scale:.2g})"
    )


def cpu_contenders(model: nn.Module, x: Tensor, folder: Path, deepsparse: str | None) -> dict[str, Run]:
    """The dense forms by name, then ours, then DeepSparse if there is a Python for it."""
    import onnxruntime
    import openvino

    threads = torch.get_num_threads()
    last, images = copy.deepcopy(model), x.to(memory_format=torch.channels_last)
    last.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    compiled = torch.compile(model)
    runs: dict[str, Run] = {
        "eager": lambda: model(x),
        "eager, channels last": lambda: last(images),
        "torch.compile": lambda: compiled(x),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = export_onnx(model, folder / "model.onnx", x, dynamic_batch=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    runs["ONNX Runtime"] = lambda: torch.from_numpy(session.run(None, {name: x.numpy()})[0])
    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    network = openvino.Core().compile_model(str(path), "CPU", settings)
    request = network.create_infer_request()
    runs["OpenVINO"] = lambda: torch.from_numpy(request.infer([x.numpy()])[0])
    fast = convert.accelerate(model, example_inputs=x)
    runs["ours"] = lambda: fast(x)
    if deepsparse:
        runs["DeepSparse"] = DeepSparse(deepsparse, model, x, folder)
    return runs


class DeepSparse:
    """DeepSparse on the same weights, in a process of its own; a call returns its output."""

    def __init__(self, python: str, model: nn.Module, x: Tensor, folder: Path) -> None:
        path, inputs, outputs = folder / "opset14.onnx", folder / "inputs.npy", folder / "outputs.npy"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.backends.mha.set_fastpath_enabled(False)  # the exporter does not know torch's fused attention
            try:
                torch.onnx.export(model, (x,), str(path), opset_version=14, dynamo=False)
            finally:
                torch.backends.mha.set_fastpath_enabled(True)
        numpy.save(inputs, x.numpy())
        worker, threads = Path(__file__).parent / "deepsparse_worker.py", str(torch.get_num_threads())
        command = [python, str(worker), str(path), str(inputs), str(outputs), threads]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        while self._line() != "ready":
            pass
        self._output = torch.from_numpy(numpy.load(outputs))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"DeepSparse ended with {self._process.wait()}")
        return line.strip()

    def __call__(self) -> Tensor:
        """Run it once, there."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._line()
        return self._output

    def end(self) -> None:
        """End its process."""
        self._process.communicate()


def measure(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(0.05)
            run()
            for _ in range(3):
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
    return times


def print_parts(model: nn.Module, x: Tensor, rounds: int) -> None:
    """Where our time goes: sparse layers, and the rest, which is the floor."""
    fast = convert.accelerate(model, example_inputs=x)
    spent: dict[str, float] = {}
    started: list[float] = []

    def before(module: nn.Module, args: object) -> None:
        started.append(time.perf_counter())

    def after(module: nn.Module, args: object, out: object) -> None:
        kind = f"sparse {module.kernel}"
        spent[kind] = spent.get(kind, 0.0) + time.perf_counter() - started.pop()

    for module in fast.modules():
        if isinstance(module, SparseLayer):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
    best: tuple[float, dict[str, float]] = (float("inf"), {})
    for _ in range(rounds):
        spent.clear()
        start = time.perf_counter()
        fast(x)
        best = min(best, (time.perf_counter() - start, dict(spent)), key=lambda pair: pair[0])
    total, kinds = best
    rest = total - sum(kinds.values())
    text = ", ".join(f"{kind} {1e3 * t:.1f} ms" for kind, t in sorted(kinds.items()))
    print(f"  of {1e3 * total:.1f} ms: {text}, everything else {1e3 * rest:.1f} ms")


def git_commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def append(rows: list[list[object]]) -> None:
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows] if new else rows)


def gpu(args: argparse.Namespace) -> None:
    """The part for a GPU."""
    import inference_gpu

    from spartan.inference.gpu import linear

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{device}, torch {torch.__version__}, {linear.status()}")
    about = [datetime.date.today().isoformat(), git_commit(), device, torch.__version__]
    models: dict[str, Callable[[], nn.Module]] = {
        name: functools.partial(build, CASES[name]) for name in args.cases or ["vit64", "vit32", "vit16"]
    }
    shape: tuple[int, ...] = (3, 224, 224)
    if args.load:
        model, shape = learned(args.load)
        models = {learned_name(args.load): lambda: model}

    def write(row: inference_gpu.Row) -> None:
        case, size, contender, least, median, ratio = row
        if args.append:
            append([[*about, case, size, contender, f"{least:.9f}", f"{median:.9f}", f"{ratio:.2f}"]])

    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPARTAN_CACHE"] = folder
        batches = args.batches or [64, 256]
        inference_gpu.bench(models, shape, batches, bool(args.load), write, args.seconds, args.wide)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), help="default: resnet50 vit16 vit32; on a GPU vit64 vit32 vit16"
    )
    parser.add_argument("--batches", type=int, nargs="+", help="default: 1 8; on a GPU 64 256")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=170.0, help="on a GPU: begin nothing new after this time")
    parser.add_argument(
        "--wide", type=int, default=0, help="on a GPU: time so many more launches of each layer's kernels"
    )
    parser.add_argument("--load", metavar="FILE", help="a packed file with learned weights, instead of the cases")
    parser.add_argument("--images", metavar="NPZ", help="compare outputs on 1,000 test images of CIFAR-10, on a CPU")
    parser.add_argument(
        "--deepsparse", metavar="PYTHON", help="on a CPU, beside ours: a Python that has it (deepsparse_worker.py)"
    )
    parser.add_argument("--parts", action="store_true", help="print what our time is spent on")
    parser.add_argument("--append", action="store_true", help=f"append the figures to {RESULTS.name}")
    args = parser.parse_args()
    if args.device == "cuda":
        gpu(args)
        return
    args.cases, args.batches = args.cases or ["resnet50", "vit16", "vit32"], args.batches or [1, 8]
    device = f"{platform.machine()}, {torch.get_num_threads()} cores"
    commit = git_commit()
    print(f"{device}, torch {torch.__version__}, {status()}")
    rows = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        os.environ["SPARTAN_CACHE"] = folder  # choices measured in this run, not in a busier one
        for name in [learned_name(args.load)] if args.load else args.cases:
            for batch in args.batches:
                model, shape = learned(args.load) if args.load else (build(CASES[name]), (3, 224, 224))
                x = torch.randn(batch, *shape)
                count = spartan.flops(model, x[:1])
                runs = cpu_contenders(model, x, Path(folder), args.deepsparse)
                reference = copy.deepcopy(model).double()(x.double())
                scale = float(reference.abs().max())
                times = measure(runs, args.rounds)
                dense = {key: min(t) for key, t in times.items() if key not in ("ours", "DeepSparse")}
                best = min(dense, key=lambda key: dense[key])
                print(f"\n{name}, batch {batch}: {count.sparse / count.dense:.1%} of the multiplications left")
                for key, t in times.items():
                    gap = float((runs[key]().double() - reference).abs().max()) / scale
                    ratio = dense[best] / min(t)
                    note = "  <- best dense" if key == best else ""
                    print(
                        f"  {key:<22} {1e3 * min(t):8.2f} ms (median {1e3 * statistics.median(t):8.2f})  "
                        f"{ratio:5.2f}x  error {gap:.0e}{note}",
                        flush=True,
                    )
                    row = [datetime.date.today().isoformat(), commit, device, torch.__version__, name, batch, key]
                    rows.append([*row, f"{min(t):.6f}", f"{statistics.median(t):.6f}", f"{ratio:.2f}"])
                for run in runs.values():
                    if isinstance(run, DeepSparse):
                        run.end()
                if args.parts:
                    print_parts(model, x, args.rounds)
                if args.images:
                    compare(model, args.images)
                torch.compiler.reset()
    if args.append:
        append(rows)


if __name__ == "__main__":
    main()
