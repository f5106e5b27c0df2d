"""Trains the runs that an exhibit lacks, by the sweep runner, and stores what they gave."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from spartan.app.paper.experiments import Experiment, estimate
from spartan.app.paper.results import Results, packaged, record_of
from spartan.app.runs import identity, read_run
from spartan.app.terminal import is_plain
from spartan.app.train.sweep import Outcome, Sweep, SweepDisplay, plan_list
from spartan.app.train.time_limit import TimeLimit


def data_sets(experiment: Experiment, data: Path | None) -> tuple[str, ...]:
    """Where a run finds its data, if not where its recipe says: in this folder, by the name of the data set."""
    source = experiment.config().data.source
    if data is None or source == "digits":
        return ()
    name = source.removeprefix("torchvision/").lower()
    file = data / f"{name}.npz"
    place = data / "imagenet" if source == "imagefolder" else file if file.is_file() else data
    return (f"data.path={place}",)


def check_imagenet(experiments: Sequence[Experiment], data: Path | None) -> None:
    """ValueError, in one line, where runs need ImageNet and there is none."""
    for experiment in experiments:
        config = experiment.config()
        if config.data.source != "imagefolder":
            continue
        place = data / "imagenet" if data is not None else Path(config.data.path or "")
        if not (place / "train").is_dir() or not (place / "val").is_dir():
            raise ValueError(
                f"--scale full trains on ImageNet-1K, and {place} has no train/ and val/ of its images; "
                "--data DIR says where DIR/imagenet is, --scale small needs CIFAR only"
            )
        return


def train_missing(
    wanted: Mapping[Experiment, Iterable[str]],
    results: Results,
    out: Path,
    jobs: int,
    data: Path | None,
    limit: TimeLimit | None = None,
) -> tuple[list[Outcome], bool]:
    """Train what has no result yet, store each result when its run ends, and tell how each run ended.

    The second answer is whether the user stopped it. What was finished before, in an earlier call that was killed, is
    found in its folder.
    """
    missing = results.missing(wanted)
    if not missing:
        return [], False
    check_imagenet(missing, data)
    folder = out / "runs" / results.scale
    points = [(one.recipe, (*one.all_sets, *data_sets(one, data))) for one in missing]
    same: dict[str, list[Experiment]] = {}  # a dense run may stand for several
    for one in missing:
        same.setdefault(identity(one.config()), []).append(one)
    planned = plan_list(points, folder)
    sweeper = Sweep(folder, min(jobs, len(planned)), limit)
    to = results.own or packaged(results.scale)

    def store(outcome: Outcome) -> None:
        if outcome.state in ("finished", "skipped"):
            run = read_run(outcome.job.folder)
            results.add([record_of(one, run) for one in same[identity(outcome.job.config)]], to)

    with SweepDisplay(planned, is_plain()) as display:
        display.line(f"{estimate(results.scale, missing)}; {sweeper.at_once} at once -> {folder}")
        return sweeper.run(planned, display, store), sweeper.stopped
