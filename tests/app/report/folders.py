"""Run folders as training writes them, file by file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from spartan.app.train.config import from_dict, to_yaml
from spartan.problem.schedules import Moment

LAYERS = [
    ("conv1.weight", (16, 3, 3, 3), 1024),
    *(
        (f"block{b}.{u}.conv{c}.weight", (16 * 2**b,) * 2 + (3, 3), 1024 // 4**b)
        for b in range(3)
        for u in range(3)
        for c in (1, 2)
    ),
    ("block2.0.shortcut.weight", (64, 32, 1, 1), 64),
    ("fc.weight", (10, 64), 1),
]  # name, shape, positions an entry is applied at
N = 5_000
COST = {"spartan": 1.0, "topkast": 1.15, "imp": 2.2}  # how hard sparsity hits accuracy


def write_run(
    folder: Path,
    *,
    method: str = "spartan",
    sparsity: float = 0.95,
    seed: int = 0,
    epochs: int = 40,
    done: int | None = None,
    steps_per_epoch: int = 195,
    **recipe: Any,
) -> Path:
    """A run that came to its end, or to the end of epoch `done`."""
    config = from_dict(
        {
            "description": "CIFAR-10, WRN-22-2 (1.08M parameters), 40 epochs; sparsity counted over the whole model",
            "method": method,
            "sparsity": sparsity,
            "seed": seed,
            "epochs": epochs,
            "model": "wrn-22-2",
            "data": {"source": "torchvision/CIFAR10", "path": "data", "pad": 4, "flip": True},
            "optimizer": {"lr": 0.2, "final_lr": 0.001, "warmup_epochs": 2, "weight_decay": 5e-4},
            "batch_size": 256,
            **recipe,
        }
    )
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(to_yaml(config), encoding="utf-8")
    versions = {"spartan": "0.1.0", "python": "3.12.3", "torch": "2.11.0", "numpy": "2.3.1", "torchvision": "0.26.0"}
    environment = {
        "command": ["spartan", "train", "cifar10-wrn22", "--set", f"seed={seed}"],
        "started": "2026-03-02T10:15:00+00:00",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "device": "NVIDIA H200",
        "versions": versions,
        "host_cores": 16,
    }
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    records = _records(method, sparsity, seed, epochs, epochs if done is None else done, steps_per_epoch)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    last = [r for r in records if r["kind"] == "epoch"][-1:]
    write_masks(folder, masks_of(seed, len([r for r in records if r["kind"] == "epoch"]), epochs, method, sparsity))
    if done is None:
        summary = _summary(method, sparsity, seed, epochs, steps_per_epoch, last[0])
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def write_masks(folder: Path, masks: np.ndarray) -> None:
    """masks.npz from bools [epochs, n]."""
    np.savez(folder / "masks.npz", bits=np.packbits(masks, axis=1), n=np.int64(masks.shape[1]))


def masks_of(seed: int, done: int, epochs: int, method: str = "spartan", sparsity: float = 0.95) -> np.ndarray:
    """Masks that wander less and less and stand still from 80% of the run on."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal(N)
    masks = np.ones((done, N), dtype=bool)
    for e in range(done):
        if method != "dense" and e < 0.8 * epochs:
            scores = scores + 0.9 * (1 - e / epochs) ** 2 * rng.standard_normal(N)
        if method != "dense":
            masks[e] = scores > np.quantile(scores, sparsity * min(1, (e + 1) / (0.2 * epochs)))
    return masks


def _records(method: str, sparsity: float, seed: int, epochs: int, done: int, per_epoch: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    at = Moment.start(epochs * per_epoch, 0.2, 0.2, seed)
    dense, soft = method == "dense", method == "spartan"
    records: list[dict[str, Any]] = []
    for step in range(1, done * per_epoch + 1):
        moment = Moment(step, at.total_steps, at.warmup_steps, at.freeze_step)
        x = step / at.total_steps
        target = 1.0 if dense else 1 - sparsity * moment.warmed
        beta = 1 + 9 * moment.progress if soft else None
        loss = 0.52 + 1.75 * math.exp(-5 * x) + 0.35 * (1 - x) * float(rng.standard_normal()) * 0.3
        lr = 0.2 * min(1, step / (2 * per_epoch)) * (0.5 + 0.5 * math.cos(math.pi * x)) + 0.001
        density = target + (0 if dense else 1e-5) if step % 50 == 0 else None
        common = {"target_density": target, "density": density, "beta": beta}
        mu = -3.2 * x if soft else None
        records.append(
            {"kind": "step", "step": step, "epoch": (step - 1) // per_epoch + 1, "lr": lr, **common, "mu": mu}
            | {"passes": 3 if soft else 0, "loss": loss}
        )
        if step % per_epoch == 0:
            final = 0.93 - (0 if dense else COST[method] * (0.01 - 0.02 * math.log10((1 - sparsity) / 0.1)))
            top1 = final - 0.5 * math.exp(-6 * x) - (0.002 + 0.03 * (1 - x)) * abs(float(rng.standard_normal()))
            histogram = None
            if soft:
                kept = np.exp(-np.linspace(0, 1, 50) * (4 + 20 * moment.progress)) + 0.05 * target * np.exp(
                    -np.linspace(1, 0, 50) * 20
                )
                histogram = [int(v) for v in 1e6 * kept / kept.sum()]
            records.append(
                {
                    "kind": "epoch",
                    "epoch": step // per_epoch,
                    "step": step,
                    "train_loss": loss,
                    "test_loss": 2.2 - 2 * top1,
                }
                | {"top1": top1, "top5": 0.98 + 0.015 * x, "images_per_s": 41234.5, "seconds": 1.2 * step / per_epoch}
                | {"density": target, "target_density": target, "beta": beta, "phase": moment.phase}
                | {"mask_histogram": histogram}
            )
    return records


def _summary(
    method: str, sparsity: float, seed: int, epochs: int, per_epoch: int, last: dict[str, Any]
) -> dict[str, Any]:
    gone = 0.0 if method == "dense" else sparsity
    layers: list[dict[str, Any]] = []
    for i, (name, shape, positions) in enumerate(LAYERS):
        size = math.prod(shape)
        kept = (
            size
            if method == "dense"
            else max(1, round(size * min(1, (1 - gone) * (2.5 if i % 5 == 0 else 0.6 + 0.05 * i))))
        )
        flops = 2.0 * size * positions
        layers.append(
            {"name": name, "shape": list(shape), "parameters": size, "kept": kept, "density": kept / size}
            | {"flops": flops, "sparse_flops": flops * kept / size}
        )
    total = sum(layer["parameters"] for layer in layers)
    return {
        **{key: last[key] for key in ("top1", "top5", "test_loss", "train_loss", "images_per_s")},
        "epochs": epochs,
        "steps": epochs * per_epoch,
        "seconds": 1.2 * epochs + seed,
        "method": method,
        "sparsity": sparsity,
        "achieved_sparsity": gone,
        "density": 1 - gone,
        "nonzero": round(total * (1 - gone)),
        "parameters": total,
        "model_parameters": total + 2_000,
        "flops_dense": sum(layer["flops"] for layer in layers),
        "flops_sparse": sum(layer["sparse_flops"] for layer in layers),
        "model_bytes": round(total * (1 - gone) * 6) + 9_000,
        "dense_bytes": 4 * (total + 2_500),
        "seed": seed,
        "layers": layers,
    }
