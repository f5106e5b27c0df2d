"""The runs that must not depend on the number of processes: methods × patterns, under DDP, FSDP2 and alone."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import spartan
from spartan import NM, Block, Channel, Sparsifier, Spartan, TopKAST, Unstructured
from spartan.methods import SET, Method, ProbMask, RigL  # type: ignore[attr-defined]
from tests.contract.cases import begin

STEPS, BATCH = 20, 8
METHODS: dict[str, Method] = {entry.name: entry.cls() for entry in spartan.methods()} | {
    "rigl": RigL(every=3, fraction=0.5),
    "set": SET(every=3, fraction=0.5),
    "probmask": ProbMask(clip=0.3),  # which most steps exceed
    "spartan-sinkhorn": Spartan(solver="sinkhorn", init="threshold"),
    "spartan-cached": Spartan(solver="sinkhorn", init="cached"),
    "spartan-soft": Spartan(project=False),
    "topkast-sparse-backward": TopKAST(backward_sparsity=0.25, exploration=1e-2),
    "topkast-every": TopKAST(every=3),
}
PATTERNS: dict[str, Any] = {
    "unstructured": Unstructured(),
    "block": Block(2, 2),
    "thin": Block(1, 2),
    "channel": Channel(),
    "nm": NM(1, 2),
}


class Net(nn.Module):
    """With uneven shards on 2 and 4 processes (7 rows), and empty ones (3 rows on 4); even ones for blocks."""

    def __init__(self, even: bool) -> None:
        super().__init__()
        a, b, c = (16, 8, 8) if even else (10, 7, 3)
        b += b % 2 if even else 0
        self.first, self.norm, self.second = nn.Linear(12, a), nn.LayerNorm(a), nn.Linear(a, b)
        self.head = nn.Linear(b + (0 if even else 1), c)  # an even number of inputs, for N:M and thin blocks
        self.pad = not even

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.norm(self.first(x)))))
        return self.head(torch.cat((x, x[:, :1]), 1) if self.pad else x)


@dataclass(frozen=True)
class Case:
    method: str
    pattern: str = "unstructured"
    budget: str | None = None
    even: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        pattern = PATTERNS[self.pattern]
        model, method = Net(self.even).double(), METHODS[self.method]
        sparsity = pattern.sparsity if isinstance(pattern, NM) else 0.7
        return begin(model, method, sparsity, pattern=pattern, budget=self.budget or method.budget)

    def sparsifier(self, model: nn.Module, **kwargs: Any) -> tuple[Sparsifier, torch.optim.Optimizer]:
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # a seed of its own on every process
        pattern = PATTERNS[self.pattern]
        sparsity = pattern.sparsity if isinstance(pattern, NM) else 0.7
        s = Sparsifier(model, sparsity, STEPS, METHODS[self.method], pattern=pattern, budget=self.budget, **kwargs)
        o = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True, weight_decay=1e-3)
        return s.attach(o), o


def shard(model: nn.Module, how: str, **kwargs: Any) -> nn.Module:
    """The model as one of many processes has it."""
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model.first, model.second):
            fully_shard(layer, mesh=mesh, **kwargs)  # type: ignore[arg-type]
        fully_shard(model, mesh=mesh, **kwargs)
    return model


def batch(step: int, how: str) -> tuple[Tensor, Tensor]:
    """This process's part of a step's data; all of it alone."""
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(BATCH, 12, dtype=torch.float64, generator=g), torch.randint(3, (BATCH,), generator=g)
    if how == "alone":
        return x, y
    n = BATCH // dist.get_world_size()
    mine = slice(dist.get_rank() * n, (dist.get_rank() + 1) * n)
    return x[mine], y[mine]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}


def train(
    model: nn.Module, s: Sparsifier, o: torch.optim.Optimizer, how: str, steps: range = range(STEPS)
) -> Iterator[dict[str, Tensor]]:
    """The weights after every step."""
    for step in steps:
        x, y = batch(step, how)
        for share in spartan.passes(s):
            (share * nn.functional.cross_entropy(model(x), y)).backward()
            if how == "alone" and share < 1:  # among other processes, nobody knows that it is
                s.backward()
        o.step()
        o.zero_grad()
        yield weights(model)


def run(case: Case, how: str, **kwargs: Any) -> tuple[list[dict[str, Tensor]], Sparsifier]:
    model = shard(case.model(), how, **kwargs)
    s, o = case.sparsifier(model)
    start = weights(model)
    return [start, *train(model, s, o, how)], s


def difference(case: Case, how: str) -> str:
    """What is different from the run of one process, at any step; nothing where the two are the same."""
    alone, one = run(case, "alone")
    many, other = run(case, how)
    worst = 0.0
    for step, (a, b) in enumerate(zip(alone, many, strict=True)):
        for name in a:
            if not torch.equal(a[name] != 0, b[name] != 0):
                return f"{case} {how}: the support of {name} differs at step {step}"
            worst = max(worst, float((a[name] - b[name]).abs().max()))
    if worst > 1e-12:
        return f"{case} {how}: weights differ by {worst:.1e}"
    if one.stats.density != other.stats.density or one.stats.target_cost != other.stats.target_cost:
        return f"{case} {how}: {one.stats} is not {other.stats}"
    if [x.kept for x in one.layers()] != [x.kept for x in other.layers()]:
        return f"{case} {how}: layers differ"
    if how == "ddp" and other.stats.bytes_sent > 1024:
        return f"{case} {how}: copies have little to exchange"
    several = dist.get_world_size() > 1  # one process has nobody to tell
    if how == "fsdp" and not several <= other.stats.bytes_sent <= several * 65536 and case.method != "dense":
        return f"{case} {how}: {other.stats.bytes_sent} bytes"
    return ""


def differences(rank: int, cases: list[tuple[Case, str]]) -> list[str]:
    found = []
    for case, how in cases:
        try:
            found.append(difference(case, how))
        except Exception as error:
            found.append(f"{case} {how}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}")
    return [x for x in found if x]
