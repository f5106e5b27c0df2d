"""One token, or a few, through the seven linear layers of a decoder block, on a CPU: where the time is reading the weights.

    python benchmarks/bench_decode.py [--tokens 1 8] [--rounds 40] [--sparsity 0.9] [--compile] [--append]

The layers are those of a Llama-like block with width 4096 and intermediate width 11008: four of 4096→4096, two of
4096→11008, one of 11008→4096; 809 MB in float32. Weights are random; single weights or blocks of 16×16 or 64×64 are kept at
random places.

Every layer has weights of its own, and between two calls of one contender on one layer the others' weights are read, more
than a gigabyte, so that nothing waits in a cache. A call's time is the least of all rounds, contenders taking turns; the
times of all calls are added up. Other programs can only make a time longer, and a long call longer sooner than a short one:
so that a busy machine is no harder on dense layers, these are called in pieces of 16 MB, which takes them about as long as
the sparse ones take in all. On a busy machine take many rounds.

Dense contenders: torch's `F.linear`; with --compile the same under `torch.compile` (max-autotune); and our kernel for
blocks on the dense weight, which reads it as fast as it reads blocks. The floor is the stored bytes at the speed of the
fastest reader: that kernel, or `torch.sum`.

`--parts decoder` measures a whole decoder instead: `transformers`' Llama with 8 layers of width 2048 and intermediate width
5504 and random weights, reading 512 tokens and writing 32, as `spartan bench FOLDER --generate 512 --length 32` does.

`--device cuda` measures on a GPU, in bfloat16, the same layers and a decoder of eight such blocks; see decode_gpu.py.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spartan import Block, prune
from spartan.inference.cpu.library import status
from spartan.inference.few import WalkLinear
from spartan.inference.runtime import SparseLinear
from spartan.zoo import torchvision

RESULTS = Path(__file__).parent / "decode.csv"
COLUMNS = ["date", "commit", "device", "torch", "sparsity", "tokens", "contender", "ms", "megabytes", "ratio", "floor"]
LAYERS = [(4096, 4096)] * 4 + [(4096, 11008)] * 2 + [(11008, 4096)]  # inputs, outputs
PIECE = 16 << 20
DEVICE = f"{platform.machine()}, {torch.get_num_threads()} cores"
SUM, OWN = "read, torch.sum", "dense float32, our kernel"
Call = Callable[[Tensor], Tensor]


def kept(outputs: int, inputs: int, block: int, sparsity: float) -> Tensor:
    """Random weights, of which blocks at random places are kept."""
    mask = torch.rand(-(-outputs // block), -(-inputs // block)) >= sparsity
    mask = mask.repeat_interleave(block, 0).repeat_interleave(block, 1)[:outputs, :inputs]
    return torch.randn(outputs, inputs).mul_(mask)


def stored(layer: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in layer.buffers())


class Contender:
    """One way to run the seven layers: calls by layer, their bytes, and the least time of each."""

    def __init__(self) -> None:
        self.calls: list[list[Call]] = []
        self.bytes = 0
        self.least: list[list[float]] = []

    def add(self, calls: list[Call], size: int) -> None:
        """One more layer, in as many calls."""
        self.calls.append(calls)
        self.bytes += size

    def start(self) -> None:
        """Forget all times."""
        self.least = [[float("inf")] * len(calls) for calls in self.calls]

    def time(self, layer: int, x: Tensor) -> None:
        """Call a layer once."""
        for i, call in enumerate(self.calls[layer]):
            start = time.perf_counter()
            call(x)
            self.least[layer][i] = min(self.least[layer][i], time.perf_counter() - start)

    @property
    def seconds(self) -> float:
        """Of all seven layers."""
        return sum(map(sum, self.least))


def pieces(weight: Tensor) -> list[Tensor]:
    """A dense weight in pieces of about 16 MB, of whole groups of outputs."""
    return list(weight.split(PIECE // weight.shape[1] // weight.element_size() // 16 * 16))


def build(sparsity: float, compiled: bool) -> dict[str, Contender]:
    torch.manual_seed(0)
    found: dict[str, Contender] = {}

    def add(name: str, size: int, *calls: Call) -> None:
        found.setdefault(name, Contender()).add(list(calls), size)

    for number, (inputs, outputs) in enumerate(LAYERS):
        print(f"packing layer {number + 1} of {len(LAYERS)}", flush=True)
        dense = torch.randn(outputs, inputs)
        half = dense.bfloat16()
        add(SUM, dense.nbytes, *((lambda x, w=w: w.sum()) for w in pieces(dense)))
        add("dense float32, F.linear", dense.nbytes, *((lambda x, w=w: F.linear(x, w)) for w in pieces(dense)))
        add(
            "dense bfloat16, F.linear",
            half.nbytes,
            *((lambda x, w=w: F.linear(x.bfloat16(), w)) for w in pieces(half)),
        )
        if compiled:
            name, linear = "dense float32, torch.compile", torch.compile(F.linear, mode="max-autotune", dynamic=False)
            add(name, dense.nbytes, *((lambda x, w=w, f=linear: f(x, w)) for w in pieces(dense)))
        own = [SparseLinear(piece, None, ("rows", 16, 8)) for piece in pieces(dense)]
        add(OWN, sum(map(stored, own)), *own)
        for kind in (torch.float32, torch.bfloat16):
            name = str(kind).removeprefix("torch.")
            walk = WalkLinear(kept(outputs, inputs, 1, sparsity).to(kind), None)
            add(f"single weights, {name}", stored(walk), walk)
            for block in (16, 64):
                rows = SparseLinear(kept(outputs, inputs, block, sparsity).to(kind), None, ("rows", 16, 8))
                add(f"{block}×{block} blocks, {name}", stored(rows), rows)
    return found


def append(rows: list[list[object]]) -> None:
    """Write figures down."""
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows] if new else rows)


def decoder(sparsity: float, commit: str, write: bool) -> None:
    """Milliseconds a token of a whole decoder, dense and on kernels for its zeros."""
    from spartan.app.generate import find_decoder, generate

    torchvision()  # transformers imports it where it is there
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
    }
    for name, block in (("single weights", 1), ("16×16 blocks", 16), ("64×64 blocks", 64)):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes)).eval()
        pattern = Block(block, block) if block > 1 else None
        prune(model, sparsity, pattern=pattern, budget="uniform", exclude=("lm_head*", "model.embed*"))
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            found = generate(find_decoder(Path(folder)), "512", 32, lambda _: None)
        same = sum(a == b for a, b in zip(*found.written.values(), strict=True))
        for tokens, rates in ((512, found.prefill), (1, found.decode)):
            base = next(iter(rates.values()))
            for contender, rate in rates.items():
                print(
                    f"  {name:<15} {tokens:4} tokens at once  {contender:<13} {1e3 / rate:8.3f} ms a token  "
                    f"{rate:8.1f} tokens/s  {rate / base:5.2f}x",
                    flush=True,
                )
                about = [datetime.date.today().isoformat(), commit, DEVICE, torch.__version__, sparsity, tokens]
                if write:
                    append(
                        [[*about, f"decoder, {name}: {contender}", f"{1e3 / rate:.3f}", "", f"{rate / base:.2f}", ""]]
                    )
        print(f"    the same token at {same} of 32", flush=True)


def gpu(args: argparse.Namespace, commit: str) -> None:
    """The part for a GPU; every figure is printed and written as soon as it is known."""
    import decode_gpu

    if args.half:
        decode_gpu.DTYPE = torch.float16

    def write(case: str, tokens: int, contender: str, least: float, size: int, ratio: float, floor: float) -> None:
        print(
            f"  {case:<8} {tokens:4} tokens  {contender:<28} {1e6 * least:10.1f} µs  {size / 1e6:8.1f} MB  {ratio:5.2f}x  "
            f"{floor:5.2f}x its floor",
            flush=True,
        )
        about = [datetime.date.today().isoformat(), commit, torch.cuda.get_device_name(), torch.__version__]
        figures = [f"{1e3 * least:.4f}", f"{size / 1e6:.1f}", f"{ratio:.2f}", f"{floor:.2f}"]
        if args.append:
            kind = ", float16" if args.half else ""
            append([[*about, args.sparsity, tokens, f"{case}{kind}: {contender}", *figures]])

    decode_gpu.bench(args.parts or decode_gpu.PARTS, args.tokens or [1, 16], args.sparsity, write)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 1; on a GPU 1 16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--parts", nargs="+", choices=["layers", "host", "decoder"], help="default: on a CPU layers, on a GPU all"
    )
    parser.add_argument("--half", action="store_true", help="on a GPU: float16, not bfloat16")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--append", action="store_true", help=f"append the figures to {RESULTS.name}")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    if args.device == "cuda":
        gpu(args, commit)
        return
    if args.parts == ["decoder"]:
        decoder(args.sparsity, commit, args.append)
        return
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {status().split(' (')[0]}, {commit}")
    contenders = build(args.sparsity, args.compile)
    rows: list[list[object]] = []
    for tokens in args.tokens or [1]:
        inputs = {n: torch.randn(tokens, n) for n in {n for n, _ in LAYERS}}
        for contender in contenders.values():
            contender.start()
        for _ in range(args.rounds):
            for layer, (size, _) in enumerate(LAYERS):
                for contender in contenders.values():
                    contender.time(layer, inputs[size])
        rate = max(c.bytes / c.seconds for c in (contenders[SUM], contenders[OWN]))
        best = min(c.seconds for name, c in contenders.items() if name.startswith("dense float32"))
        print(f"\n{tokens} tokens, {args.sparsity:.0%} zeros; reading runs at {rate / 1e9:.1f} GB/s")
        for name, contender in contenders.items():
            least, floor = contender.seconds, contender.bytes / rate
            print(
                f"  {name:<30} {1e3 * least:8.2f} ms  {contender.bytes / 1e6:7.1f} MB  {best / least:6.2f}x the best "
                f"dense float32  {least / floor:5.2f}x its floor",
                flush=True,
            )
            about = [datetime.date.today().isoformat(), commit, DEVICE, torch.__version__]
            figures = [
                f"{1e3 * least:.3f}",
                f"{contender.bytes / 1e6:.1f}",
                f"{best / least:.2f}",
                f"{least / floor:.2f}",
            ]
            rows.append([*about, args.sparsity, tokens, name, *figures])
    if args.append:
        append(rows)


if __name__ == "__main__":
    main()
