"""Runs grids of settings: each run in its own process, several at once, finished ones skipped, failing ones survived."""

import hashlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spartan.app.runs import epochs_done, identity, is_finished, is_run, read_run, result_line
from spartan.app.terminal import ProgressBar
from spartan.app.train.config import Config, RecipeError, load_with_note
from spartan.app.train.processes import PARENT, StopSignals
from spartan.app.train.recipe_text import compose_yaml
from spartan.app.train.time_limit import TimeLimit
from spartan.wording import shortened


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    recipe: str
    folder: Path
    config: Config
    # the settings on top of the recipe, seed included
    sets: tuple[str, ...]
    # what of the recipe they made go, with its method
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """How one run of a sweep ended."""

    job: Job
    # stopped: by a signal or for lack of time; left: not begun, since it would not have ended in time
    state: Literal["finished", "skipped", "failed", "stopped", "left"]
    # for a failed run: why, in the last lines of its log
    reason: str = ""
    # from its start to its end
    seconds: float = 0.0


def split_values(text: str) -> list[str]:
    """`a,b,[c,d]` → a | b | [c,d]: commas inside brackets, braces and quotes do not separate. Empty if one has no value."""
    listed = f"[{text}]"
    try:
        items = compose_yaml(listed, "--set").value
    except RecipeError:
        return []
    return [listed[item.start_mark.index : item.end_mark.index] for item in items] or [""]


def grid(sets: Sequence[str], seeds: int | None = None) -> list[tuple[str, ...]]:
    """Every combination of the values, each as `key=value` settings; seeds vary fastest."""
    axes: dict[str, list[str]] = {}
    for setting in sets:
        key, equals, text = setting.partition("=")
        key, values = key.strip(), split_values(text)
        if not equals or not key or not values:
            shown = shortened(repr(setting))
            raise RecipeError(f"--set {shown}: write key=value or key=value,value, such as --set sparsity=.9,.95")
        if key in axes:
            raise RecipeError(f"--set {key} is given twice; write its values in one: --set {key}=a,b")
        axes[key] = values
    if "seed" in axes and seeds is not None:
        raise RecipeError("--seeds and --set seed=… both name the seeds; give one of them")
    if "seed" not in axes:
        if seeds is not None and seeds < 1:
            raise RecipeError(f"--seeds: {seeds} is too small; it must be at least 1")
        axes["seed"] = [str(seed) for seed in range(seeds or 1)]
    return [
        tuple(f"{key}={value}" for key, value in zip(axes, values, strict=True))
        for values in itertools.product(*axes.values())
    ]


def plan(recipe: str, sets: Sequence[str], seeds: int | None, out: Path) -> list[Job]:
    """The runs of a sweep over a grid, as `plan_list` has them."""
    return plan_list([(recipe, point) for point in grid(sets, seeds)], out)


def plan_list(points: Sequence[tuple[str, tuple[str, ...]]], out: Path) -> list[Job]:
    """Runs, each by its recipe and settings; one that is in `out` already keeps its folder, a repeated one is left out."""
    if is_run(out):
        raise RecipeError(f"--out: {out} is a run itself; a sweep needs a folder to put its runs in")
    runs = [p for p in sorted(out.glob("*")) if is_run(p) and not p.name.startswith(".")]
    there = {identity(read_run(run).config): run for run in runs}
    jobs: dict[str, Job] = {}
    taken = set(there.values())
    common = set.intersection(*(set(point) for _, point in points)) if points else set()
    for recipe, point in points:
        config, note = load_with_note(recipe, point)
        same = identity(config)
        if same in jobs:
            continue
        folder = there.get(same) or out / _name(config, [setting for setting in point if setting not in common])
        if same not in there and (folder in taken or folder.exists()):
            folder = folder.with_name(f"{folder.name}-{hashlib.sha256(same.encode()).hexdigest()[:8]}")
        taken.add(folder)
        jobs[same] = Job(recipe, folder, config, point, note)
    return list(jobs.values())


def _name(config: Config, varied: Sequence[str]) -> str:
    """The method, the sparsity, whatever else varies, and the seed."""
    extra = "".join(f"-{s}" for s in varied if not s.startswith(("method=", "sparsity=", "seed=")))
    extra = re.sub(r"[^\w.=+-]+", "_", extra)
    if len(extra) > 100:
        extra = "-" + hashlib.sha256(extra.encode()).hexdigest()[:8]
    return re.sub(r"[^\w.=+-]+", "_", f"{config.method}-{config.sparsity:g}{extra}-seed{config.seed}")


@dataclass(frozen=True)
class _Running:
    """A run that goes on: its process, the length that its log had before, when it began, and whether at its first step."""

    process: subprocess.Popen[bytes]
    log_begin: int
    began: float
    anew: bool


class Sweep:
    """Runs jobs in processes of their own, up to `at_once` together; a stop signal makes all that run save and end.

    Args:
        out: where their logs go, in a folder `logs`.
        at_once: how many run together.
        limit: the time there is; no run is begun that would not end in it.
        program: what is given the words of `spartan train`.
    """

    def __init__(
        self,
        out: Path,
        at_once: int,
        limit: TimeLimit | None = None,
        program: Sequence[str] = (sys.executable, "-m", "spartan"),
    ) -> None:
        self.out, self.at_once, self.limit, self.program = out, at_once, limit, program
        self.stopped = False  # by a signal
        self._running: dict[Path, _Running] = {}

    def run(
        self, jobs: Sequence[Job], display: "SweepDisplay", tell: Callable[[Outcome], None] = lambda outcome: None
    ) -> list[Outcome]:
        """Every job's outcome, in the order of the jobs; `tell`, then `display`, hear of each as it comes."""
        outcomes: dict[Path, Outcome] = {}
        asked: set[Path] = set()  # runs that were asked to stop
        # Ctrl-C, SIGTERM and a closed terminal stop the sweep in order.
        numbers = [signal.SIGINT, signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
        with StopSignals(launched=True, numbers=numbers) as signals:
            while len(outcomes) < len(jobs):
                self.stopped |= signals.caught is not None
                if self._ending:
                    for folder in self._running.keys() - asked:
                        self._running[folder].process.terminate()
                        asked.add(folder)
                if self.limit is not None and self.limit.over:
                    for running in self._running.values():
                        running.process.kill()
                for job in jobs:
                    if job.folder not in outcomes and (outcome := self._look_after(job)):
                        outcomes[job.folder] = outcome
                        tell(outcome)
                        display.outcome(outcome)
                display.show_epochs(sum(map(epochs_done, self._running)))
                time.sleep(0.1)
        return [outcomes[job.folder] for job in jobs]

    @property
    def _ending(self) -> bool:
        """Whether what runs is to save and end."""
        return self.stopped or (self.limit is not None and self.limit.left <= 0)

    def _look_after(self, job: Job) -> Outcome | None:
        """Start a job when there is room for it, and tell how it ended when it has."""
        log = self.out / "logs" / f"{job.folder.name}.txt"
        if job.folder in self._running:
            return self._ended(job, log)
        if not self._ending and len(self._running) == self.at_once:
            return None
        if is_finished(job.folder):
            return Outcome(job, "skipped")
        if self.stopped:
            return Outcome(job, "stopped")
        if self.limit is not None and not self.limit.allows(job):
            return Outcome(job, "left")
        try:
            self._running[job.folder] = self._start(job, log)
        except OSError as error:
            return Outcome(job, "failed", f"{type(error).__name__}: {error}")
        return None

    def _ended(self, job: Job, log: Path) -> Outcome | None:
        """How a job that was started ended, if it has."""
        running = self._running[job.folder]
        code, seconds = running.process.poll(), time.monotonic() - running.began
        if code is None:
            return None
        del self._running[job.folder]
        if code == 0 and is_finished(job.folder):
            if self.limit is not None and running.anew:
                self.limit.add(job, seconds)
            return Outcome(job, "finished", seconds=seconds)
        if self._ending:
            return Outcome(job, "stopped", seconds=seconds)
        return Outcome(job, "failed", _reason(code, log, running.log_begin), seconds)

    def _start(self, job: Job, log: Path) -> _Running:
        anew = not is_run(job.folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            begin = sink.tell()
            process = subprocess.Popen(
                self._command(job),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,  # Ctrl-C reaches it once, through the sweep
            )
            return _Running(process, begin, time.monotonic(), anew)

    def _command(self, job: Job) -> list[str]:
        base = [*self.program, "train"]
        if is_run(job.folder):
            return [*base, "--resume", str(job.folder), "--quiet"]
        sets = [word for setting in job.sets for word in ("--set", setting)]
        return [*base, job.recipe, *sets, "--out", str(job.folder), "--quiet"]

    def _environment(self) -> dict[str, str]:
        """Several runs share the cores; each taking all of them would slow all of them down."""
        share = max(1, (os.cpu_count() or 1) // self.at_once)
        limits = {"OMP_NUM_THREADS": str(share)} if self.at_once > 1 else {}
        return limits | dict(os.environ) | {"PYTHONUNBUFFERED": "1", PARENT: str(os.getpid())}


def _reason(code: int, log: Path, begin: int, lines: int = 3) -> str:
    """The exit status and the end of what the run wrote this time."""
    with log.open("rb") as file:
        file.seek(begin)
        text = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "\n".join([f"{how}; log: {log}", *text[-lines:]])


def out_of_time(outcomes: Sequence[Outcome]) -> str:
    """What a time limit left undone, in words; empty where nothing is."""
    count = sum(outcome.state in ("left", "stopped") for outcome in outcomes)
    return f"out of time: {count} of {len(outcomes)} runs are left; the same command goes on with them" if count else ""


class SweepDisplay(ProgressBar):
    """How far a sweep is: a line for each run that ended and, on a terminal, a bar below them."""

    def __init__(self, jobs: Sequence[Job], plain: bool) -> None:
        self._total, self._done = len(jobs), 0
        self._epochs = 0  # of runs that ended
        # What was finished before takes no time, and would make the rest look fast.
        epochs = sum(job.config.epochs for job in jobs if not is_finished(job.folder))
        super().__init__(not plain, f"0/{len(jobs)} runs", epochs, ("TimeElapsedColumn", "TimeRemainingColumn"))

    def line(self, text: str) -> None:
        """Say something."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def outcome(self, outcome: Outcome) -> None:
        """A run ended, or is not begun for lack of time."""
        self._done += 1
        if outcome.state == "left":  # there may be many, and they are counted in the end
            return
        text = f"[{self._done}/{self._total}] {outcome.state} {outcome.job.folder.name}"
        if outcome.state == "finished":
            text += f": {result_line(read_run(outcome.job.folder).summary or {})}"
        self.line(text)
        self._epochs += outcome.job.config.epochs if outcome.state != "skipped" else 0
        self.show_epochs(0)

    def show_epochs(self, epochs: int) -> None:
        """So many epochs of the runs that have not ended are done."""
        if self._bar is not None:
            text = f"{self._done}/{self._total} runs"
            self._bar.update(self._task, completed=self._epochs + epochs, description=text)
