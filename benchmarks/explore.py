"""Explores what a default method should do: runs recipes with settings of an experimental method, each a row of a CSV.

    python benchmarks/explore.py JOBS.txt --csv benchmarks/explore.csv [--jobs 10] [--seconds 590] [--data cifar10.npz]

A line of JOBS.txt is a recipe and its settings, as after `spartan train`: `bytes-gpt sparsity=0.9 method_args.p=3`. The
method is `explore` (below) unless `method=…` names another. Lines run side by side, `--jobs` at a time, each in a process
of its own; failures are rows too. A row is written when its run ends, and lines that the CSV has a result of are left
out, but for rows of commits before a method's last change (`BEFORE` in compare.py): the same command again does what is
missing. With `--seconds` no run is begun that would not end in that time, by what ended runs took, and what still runs
then is asked to stop; it goes on from its checkpoint where its folder is still there. Without git, as in a copy of the
tree, SPARTAN_COMMIT says which commit rows are of. Beside the CSV, FILE.log has what was seen of each run of `explore`,
twenty times: how far weights move a step and how many of those that are kept are exchanged.

`explore` is what these methods are points of: Top-KAST (p=inf), Feather (p=3), IMP (p=inf, gradient=0), by

    w = θ · mask of what is kept, hard (p=inf) or shrunk near the threshold
    gradients: g where kept, `gradient`·g elsewhere
    updates: the optimizer's where kept, `pace` times it elsewhere
    decay: `decay`·θ added to the gradient where pruned
    leak: what is pruned loses the fraction `leak`/T of itself in each of the T steps; with `cooling` more at first, and
        nothing at the end

With `control` the pace is not given but found: such that in a twentieth of the run a share of `control` times the
sparsity of the moment is exchanged among what is kept; in the second half of the run less and less, and the pace only
falls. With `along` what is pruned gets of its gradient the part along θ, unit by unit; of single weights that is all.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from explore_rows import COLUMNS, as_point, row_of, rows_of, settings_of
from torch import Tensor, nn

from spartan.app.cli import main as spartan_command
from spartan.app.paper.experiments import alone
from spartan.app.runs import is_finished, is_run
from spartan.app.train import folder
from spartan.app.train.config import RecipeError, load_recipe
from spartan.app.train.sweep import Outcome, Sweep, SweepDisplay, out_of_time, plan_list
from spartan.app.train.time_limit import TimeLimit
from spartan.methods.base import Method
from spartan.methods.paced import Paced
from spartan.methods.registry import register
from spartan.problem.schedules import Moment, Schedule, as_schedule, cubic
from spartan.problem.targets import Target
from spartan.solvers.forms import Form, Mask, Shrunk, Where
from spartan.solvers.torch import TorchSolver

LOOKS = 20
_seen: dict[int, dict[str, Any]] = {}  # what was there at the last look, by solver


@register
@dataclass(frozen=True)
class Explore(Method):
    """What Top-KAST, Feather and IMP are points of."""

    p: float = math.inf
    gradient: Schedule | float = 1.0
    pace: Schedule | float = 1.0
    decay: float = 0.0
    leak: float = 0.0
    cooling: bool = False
    control: float = 0.0
    along: bool = False
    ramp: Schedule = cubic(0.0, 1.0)

    name = "explore"
    year = 2026
    mask_rule = "top-k of |θ|, every step"
    gradient_rule = "g where kept, a multiple elsewhere; updates likewise"
    reference = "none"
    refuses_nm = ""
    warmup = 0.5
    finetune = 0.0

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """By magnitude; now and then look at what moves."""
        seen = _seen.setdefault(id(solver), {"pace": 1.0, "masks": []})
        if self.leak and at.step and seen.get("leaked") != at.step and solver.a is not None:
            seen["leaked"] = at.step
            kept = solver.per_target(solver.spread(solver.kept(Form())))
            lost = self.leak / at.total_steps * (2.0 * (1.0 - at.step / at.total_steps) if self.cooling else 1.0)
            solver.rewrite(lambda i, x: torch.where(kept[i], x, x * (1.0 - lost)))
        solver.solve(solver.k)
        if self.control and at.due:
            self.adapt(solver, at, seen)
        look(solver, at)

    def adapt(self, solver: TorchSolver, at: Moment, seen: dict[str, Any]) -> None:
        """Let the pace follow what was exchanged in the last twentieth of the run."""
        kept = solver.kept(Form())
        if len(seen["masks"]) == 5:
            was = seen["masks"].pop(0)
            changed = float((kept & ~was).sum() / kept.sum())
            sparsity = 1.0 - float(kept.float().mean())
            x = at.step / at.total_steps
            target = self.control * sparsity * min(1.0, 2.0 * (1.0 - x))
            if changed > 0 and target > 0:
                by = (target / changed) ** 0.2
                seen["pace"] = min(4.0, max(0.02, seen["pace"] * (by if x < 0.5 else min(1.0, by))))
        seen["masks"].append(kept)

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """The declarations above."""
        g, f = (as_schedule(x).at(at.progress) for x in (self.gradient, self.pace))
        if self.control:
            f = _seen[id(solver)]["pace"] if id(solver) in _seen else 1.0
        mask = Mask.ONE if math.isinf(self.p) else Shrunk(self.p)
        decay = Where(0.0, self.decay, self.decay) if self.decay else None
        pace = None if f == 1.0 else Where(1.0, f, f)
        if not self.along:
            return Form(mask, Where(1.0, g, g), decay, pace=pace)

        def weights(thetas: Sequence[Tensor]) -> list[Tensor]:
            kept = solver.per_target(solver.spread(solver.kept(Form())))
            return [Along.apply(solver, i, x, kept[i]) for i, x in enumerate(thetas)]

        return Form(mask, Where(1.0, g, g), decay, own=weights, pace=pace)


@register
@dataclass(frozen=True)
class Tried(Paced):
    """Paced with what else was tried: S²-SAM, gradients of pruned units along θ, magnitudes that are scaled by layer, and
    gradients of pruned weights that count less in outputs of which little is kept.

    S²-SAM (NeurIPS 2024): gradients are taken where the last one would have led, uphill by `uphill` in all. Magnitudes
    count times the inputs of a layer to the power `layers`/2: at 1 all layers would begin with as large a share. With
    `rows` the gradients of pruned weights are multiplied by what is kept of their output: its norm (the Euclidean, or that
    of `norm`) over the mean one of its layer (`rows=mean`) or over that of all its weights (`rows=whole`), at most 1 and at
    least `floor`: what Paced does where batch norm follows is `rows=whole often=true floor=0.001`. It is measured at each
    look, or with `often` at each step; with `along` blocks learn along θ as well. With `rows=gradient` outputs whose
    gradient is larger than `norm` times that of an output of its layer, outputs counted by how many of their weights are
    kept, are brought down to it. With `rescale`
    weights are multiplied by what is kept of their output, as in ST-3, which does that to all gradients.
    """

    uphill: float = 0.0
    along: bool = False
    layers: float = 0.0
    rows: str = ""
    floor: float = 0.003
    often: bool = False
    norm: float = 2.0
    rescale: bool = False

    name = "tried"

    def scale(self, target: Target) -> float:
        """What a layer's magnitudes are multiplied by."""
        return (target.numel / target.parameter.shape[0]) ** (self.layers / 2)

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """Remember the last gradient."""
        super().choose(solver, at)
        if self.uphill:
            grads = [t.parameter.grad for t in solver.problem.targets]
            _seen.setdefault(id(solver), {})["grads"] = [None if g is None else g.detach().clone() for g in grads]

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """Beside what Paced declares, the weights' own expression."""
        form = super().form(solver, at)
        if self.rescale and isinstance(form.mask, Shrunk):
            form = form._replace(mask=Shrunk(self.p, row_scale=True))
        if self.rows:
            return self._rowed(solver, form, at)
        if not (self.uphill or self.along):
            return form

        def weights(thetas: Sequence[Tensor]) -> list[Tensor]:
            kept = solver.per_target(solver.spread(solver.kept(Form())))
            if self.along:
                return [Along.apply(solver, i, x, kept[i]) for i, x in enumerate(thetas)]
            found = solver.weights(form)
            grads = _seen.get(id(solver), {}).get("grads")
            if grads is not None and at.step < at.total_steps and all(g is not None for g in grads):
                ways = [torch.where(k, g, 0.0) for k, g in zip(kept, grads, strict=True)]
                norm = torch.stack([way.square().sum() for way in ways]).sum().sqrt().clamp(min=1e-12)
                found = [w + self.uphill * way / norm for w, way in zip(found, ways, strict=True)]
            return [x + (w - x).detach() for w, x in zip(found, thetas, strict=True)]

        return form._replace(own=weights)

    def _rowed(self, solver: TorchSolver, form: Form, at: Moment) -> Form:
        """Gradients of pruned weights, times how much is kept of their output."""

        def weights(thetas: Sequence[Tensor]) -> list[Tensor]:
            kept = solver.per_target(solver.spread(solver.kept(Form())))
            found = solver.weights(form)
            if self.rows == "gradient":
                guarded = [Guarded.apply(x, k, self.norm) for x, k in zip(thetas, kept, strict=True)]
                return [w.detach() + (b - b.detach()) for w, b in zip(found, guarded, strict=True)]
            seen = _seen.setdefault(id(solver), {})
            looks = solver.state.numbers["looks"]
            if self.often or seen.get("measured") != looks:
                seen["measured"] = looks
                norms = [w.detach().float().reshape(len(w), -1).norm(float(self.norm), dim=1) for w in found]
                wholes = [x.detach().float().reshape(len(x), -1).norm(float(self.norm), dim=1) for x in thetas]
                if self.rows == "mean":
                    wholes = [n.mean() for n in norms]
                seen["rows"] = [
                    (n / o.clamp(min=1e-12)).clamp(self.floor, 1.0) for n, o in zip(norms, wholes, strict=True)
                ]
            factors = [r.to(x.dtype).view(-1, *[1] * (x.dim() - 1)) for r, x in zip(seen["rows"], thetas, strict=True)]
            if self.along:
                thetas = [Along.apply(solver, i, x, kept[i], True) for i, x in enumerate(thetas)]
            back = [x * torch.where(k, 1.0, r) for x, k, r in zip(thetas, kept, factors, strict=True)]
            return [w.detach() + (b - b.detach()) for w, b in zip(found, back, strict=True)]

        return form._replace(own=weights, damp=None)


def without_norm(classes: int = 10) -> nn.Sequential:
    """The net of `digits` without batch norm (model=explore:without_norm)."""

    def conv(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        layer = nn.Conv2d(inputs, outputs, 3, stride, 1)
        nn.init.kaiming_normal_(layer.weight)
        return [layer, nn.ReLU()]

    body = [*conv(1, 32, 1), *conv(32, 64, 2), *conv(64, 64, 2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class Guarded(torch.autograd.Function):
    """θ; its gradient is g where kept, and elsewhere at most so many times as large as is usual for an output."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, kept: Tensor, most: float) -> Tensor:
        """As it is."""
        ctx.save_for_backward(kept)
        ctx.most = most
        return theta.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """g, or less of it."""
        (kept,) = ctx.saved_tensors
        sizes, counts = g.float().reshape(len(g), -1).norm(dim=1), kept.reshape(len(g), -1).sum(1)
        usual = (sizes * counts).sum() / counts.sum().clamp(min=1)
        by = (ctx.most * usual / sizes.clamp(min=1e-30)).clamp(max=1.0).view(-1, *[1] * (g.dim() - 1))
        return g * torch.where(kept, 1.0, by), None, None


class Along(torch.autograd.Function):
    """θ where kept; its gradient is g there, and elsewhere the part of g along θ, unit by unit."""

    @staticmethod
    def forward(ctx: Any, solver: TorchSolver, i: int, theta: Tensor, kept: Tensor, whole: bool = False) -> Tensor:
        """Hard, or the whole of θ."""
        ctx.save_for_backward(theta, kept)
        ctx.of = solver.problem, i
        return theta.clone() if whole else torch.where(kept, theta, 0.0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """g, or its part along θ."""
        (problem, i), (theta, kept) = ctx.of, ctx.saved_tensors
        sums = [problem.reduce(i, x) for x in (g * theta, theta * theta)]
        along = problem.expand(i, sums[0] / sums[1].clamp(min=1e-12)) * theta
        return None, None, torch.where(kept, g, along), None, None


def look(solver: TorchSolver, at: Moment) -> None:
    """Write down how far weights moved in this step and how many that are kept are others."""
    every, path = max(2, at.total_steps // LOOKS), os.environ.get("EXPLORE_LOG")
    if path is None or at.step % every not in (every - 1, 0):
        return
    theta = torch.cat([x.detach().float().reshape(-1) for x in solver.theta.views])
    kept = torch.cat([x.reshape(-1) for x in solver.per_target(solver.spread(solver.kept(Form())))])
    seen = _seen.setdefault(id(solver), {})
    if at.step % every == 0 and "theta" in seen:
        way, was = theta - seen["theta"], seen["kept"]
        facts = {
            "step": at.step,
            "tau": float(theta.abs()[kept].min()),
            "pruned": float(way[~was].square().mean().sqrt()) if bool((~was).any()) else 0.0,
            "kept": float(way[was].square().mean().sqrt()),
            "rms": float(theta[kept].square().mean().sqrt()),
            "pace": seen.get("pace", 0.0),
            "changed": float((kept & ~was).sum() / kept.sum()),
            "changed_since_last": float((kept & ~seen["last"]).sum() / kept.sum()) if "last" in seen else 0.0,
        }
        with open(path, "a") as file:
            file.write(
                f"{os.environ.get('EXPLORE_RUN')}\t" + "\t".join(f"{k}={v:.4g}" for k, v in facts.items()) + "\n"
            )
        seen["last"] = kept
    seen.update(theta=theta, kept=kept)


def name_of_run(words: Sequence[str]) -> str:
    """What the log calls a run: its line, by the words of `train`; one that is continued, by its folder."""
    if "--resume" in words:
        return Path(words[words.index("--resume") + 1]).name
    sets = [
        word for option, word in itertools.pairwise(words) if option == "--set" and not word.startswith("data.path")
    ]
    return " ".join((words[0], *sets))


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path, metavar="JOBS.txt", help="the runs, a line each")
    parser.add_argument("--csv", type=Path, required=True, help="where rows go; runs that it has are left out")
    parser.add_argument("--jobs", type=int, default=10, help="how many runs at once (10)")
    parser.add_argument("--seconds", type=float, help="end within so many; begin no run that would not end by then")
    parser.add_argument("--out", type=Path, default=Path("runs/explore"), help="where run folders go (runs/explore)")
    parser.add_argument("--data", type=Path, help="an .npz of the images, for lines that do not say where theirs are")
    args = parser.parse_args()
    lines = [line.strip() for line in args.list.read_text().splitlines() if line.strip() and line[0] != "#"]
    commit = folder.commit(dirty=True) or "unknown"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    first = [datetime.date.today().isoformat(), commit, device, torch.__version__]
    there, points = rows_of(args.csv), []
    for line in lines:
        recipe, sets = as_point(line)
        try:
            config = load_recipe(recipe, sets)
        except RecipeError as error:
            sys.exit(f"{line}: {error}")
        if (recipe, frozenset(settings_of(sets).split()), str(config.seed)) in there:
            continue
        images = args.data is not None and config.data.source.startswith("torchvision/")
        own = any(s.startswith("data.path=") for s in sets)
        points.append((recipe, (*sets, f"data.path={args.data}") if images and not own else sets))
    out = args.out / commit  # runs of another commit say nothing of this one
    planned = plan_list(points, out)
    print(f"{len(lines)} lines, {len(lines) - len(points)} of them in {args.csv} already", flush=True)
    for job in planned:  # what these methods remember is in no checkpoint
        if job.config.method in (Explore.name, Tried.name) and is_run(job.folder) and not is_finished(job.folder):
            shutil.rmtree(job.folder)
    os.environ["EXPLORE_LOG"] = str(args.csv.with_suffix(".log").absolute())
    limit = None
    if args.seconds is not None:
        limit = TimeLimit(began + args.seconds, lambda job: alone(job.recipe, job.config))
    sweeper = Sweep(out, args.jobs, limit, (sys.executable, __file__))
    new = not args.csv.exists()
    with args.csv.open("a", newline="") as file, SweepDisplay(planned, plain=True) as display:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)

        def write(outcome: Outcome) -> None:
            if outcome.state == "failed":
                print(f"{' '.join((outcome.job.recipe, *outcome.job.sets))}: {outcome.reason}", flush=True)
            if outcome.state in ("finished", "skipped", "failed"):
                writer.writerow([*first, *row_of(outcome)])
                file.flush()

        outcomes = sweeper.run(planned, display, write)
    if told := out_of_time(outcomes):
        print(told)
    if sweeper.stopped:
        sys.exit(130)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:  # a run of the list: `spartan train`, which knows the methods of this file
        os.environ["EXPLORE_RUN"] = name_of_run(sys.argv[2:])
        spartan_command()
    else:
        main()
