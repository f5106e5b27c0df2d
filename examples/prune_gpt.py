"""Prune a trained language model three ways, finetune it with its zeros, compare, export, and let it write.

    python examples/prune_gpt.py                 a minute or two on two cores
    python examples/prune_gpt.py --steps 2000    a better model to begin with

The model is a small decoder on bytes, the text the sources of Python's standard library. It is trained dense, then pruned
to 50, 70 and 90% by magnitude, Wanda and SparseGPT; at 90%, where one shot is not enough, it is trained on with its
zeros (`Sparsifier.from_sparse`), and pruned gradually with the dense model as its teacher (`method="gradual"`).
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import spartan
from spartan.gpt import GPT

CONTEXT, BATCH = 64, 16
SIZES = {"layers": 2, "width": 96, "heads": 3}
# What a file says of the model, so that it can be built by name.
ARCHITECTURE = {"model": "gpt", "classes": 256, "shape": [CONTEXT], "args": SIZES}


def read_text() -> tuple[Tensor, Tensor]:
    """The sources of the standard library's own folder as bytes: every tenth file to test on, the others to train on."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 0) is test) for test in (False, True)]
    train, test = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts)
    return train, test


def sequences(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """So many pieces of the text, each with the byte after it."""
    starts = torch.randint(len(text) - CONTEXT, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


@torch.no_grad()
def test_loss(model: GPT, text: Tensor) -> float:
    """Per byte, on 400 pieces of the test text."""
    both = sequences(text, 400, torch.Generator().manual_seed(0))
    return cross_entropy(model(both[:, :-1]).flatten(0, 1), both[:, 1:].flatten()).item()


def train(
    model: GPT,
    text: Tensor,
    steps: int,
    lr: float,
    sparsifier: spartan.Sparsifier | None = None,
    teacher: GPT | None = None,
) -> GPT:
    """A plain loop; the only lines about sparsity are where the sparsifier is attached and finalized."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    if sparsifier is not None:
        sparsifier.attach(optimizer)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        both = sequences(text, BATCH, generator)
        scores = model(both[:, :-1])
        loss = cross_entropy(scores.flatten(0, 1), both[:, 1:].flatten())
        if teacher is not None:
            with torch.no_grad():
                its = teacher(both[:, :-1])
            loss = 0.5 * loss + 0.5 * spartan.distillation_loss(scores, its)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if sparsifier is not None:
        sparsifier.finalize()
    return model


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=700, help="of dense training")
    parser.add_argument("--finetune-steps", type=int, default=250)
    parser.add_argument("--out", type=Path, help="folder for the files; by default one that is gone afterwards")
    args = parser.parse_args()
    started = time.monotonic()
    text, test = read_text()
    torch.manual_seed(0)
    dense = train(GPT(context=CONTEXT, **SIZES), text, args.steps, 2e-3)
    print(f"dense                         loss {test_loss(dense, test):.3f}", flush=True)

    calibration = list(sequences(text, 128, torch.Generator().manual_seed(2))[:, :-1].split(16))
    pruned = dense
    for sparsity in (0.5, 0.7, 0.9):
        for criterion in ("magnitude", "wanda", "sparsegpt"):
            data = None if criterion == "magnitude" else calibration
            pruned = spartan.prune(
                copy.deepcopy(dense),
                sparsity,
                criterion=criterion,
                calibration=data,
                budget="uniform",
                exclude="head.*",
            )
            print(f"pruned to {1 - sparsity:.0%} by {criterion:11}  loss {test_loss(pruned, test):.3f}", flush=True)

    fixed = train(pruned, text, args.finetune_steps, 1e-3, spartan.Sparsifier.from_sparse(pruned, exclude="head.*"))
    print(f"trained on with its zeros     loss {test_loss(fixed, test):.3f}", flush=True)
    model = copy.deepcopy(dense)
    sparsifier = spartan.Sparsifier(model, 0.9, args.finetune_steps, "gradual", budget="uniform", exclude="head.*")
    gradual = train(model, text, args.finetune_steps, 1e-3, sparsifier, teacher=dense)
    print(f"gradually, with a teacher     loss {test_loss(gradual, test):.3f}", flush=True)

    best = min((fixed, gradual), key=lambda model: test_loss(model, test))
    found = spartan.verify(best, 0.9, budget="uniform", exclude="head.*")
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        sizes = {}
        for name, each in (("dense", dense), ("sparse", best)):
            file = out / f"{name}.safetensors"
            spartan.save(each, file, architecture=ARCHITECTURE)
            sizes[name] = file.stat().st_size
        again: Any = spartan.load(out / "sparse.safetensors", kernels="dense")
    print(f"{found.density:.2%} of the weights left, {sizes['dense']:,} bytes before, {sizes['sparse']:,} now")
    prompt = torch.tensor([list(b"def read(self, ")])
    written = again.generate(prompt, 60, temperature=0.5, generator=torch.Generator().manual_seed(0))
    print("it writes:", bytes(written[0].tolist()).decode("utf-8", "replace").replace("\n", "\n           "))
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
