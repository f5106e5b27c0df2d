"""The commands about runs: `train`, `sweep`, `evaluate`, `compare`, `report`, and what runs are made of."""

import os
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from spartan.app.commands import Sets, Target

# What runs a command is imported by it, so that help needs neither torch nor the extras.
if TYPE_CHECKING:
    from spartan.app.train.config import Config


def recipes() -> None:
    """List the built-in recipes.

    `spartan train NAME --show` prints one in full.
    """
    from spartan.app.runs import data_name
    from spartan.app.terminal import print_table
    from spartan.app.train.config import load_recipe, recipe_names

    configs = {name: load_recipe(name) for name in recipe_names()}
    rows = [[n, c.model, data_name(c), f"{c.sparsity:g}", c.description] for n, c in configs.items()]
    print_table(["name", "model", "data", "sparsity", "description"], rows)


def methods() -> None:
    """List the sparse training methods.

    Any of them is a value for `--set method=…`. θ are the dense weights, w the sparse ones that the model holds, g the
    gradient for w.
    """
    import spartan
    from spartan.app.terminal import print_table

    header = ["name", "year", "mask", "gradient for θ", "needs", "sparse from", "reference"]
    facts = ("name", "year", "mask_rule", "gradient_rule", "needs", "sparse_from", "reference")
    print_table(header, [[str(getattr(entry, fact)) for fact in facts] for entry in spartan.methods()])


def train(
    recipe: Annotated[
        str | None, Argument(metavar="RECIPE", help="A built-in recipe or a .yaml file.  [default: digits]")
    ] = None,
    sets: Sets = None,
    out: Annotated[
        Path | None,
        Option(metavar="DIR", help="The run folder.  [default: runs/<recipe>-<method>-<sparsity>-seed<seed>]"),
    ] = None,
    resume: Annotated[
        Path | None, Option(metavar="DIR", help="Continue the run in this folder, exactly where it stopped.")
    ] = None,
    show: Annotated[bool, Option("--show", help="Print the resolved recipe as YAML and exit.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print the result only.")] = False,
) -> None:
    """Train a model by a recipe, or continue a run.

    \b
    spartan train                                        the digits recipe
    spartan train cifar10-wrn22 --set sparsity=.98 --set seed=1
    spartan train bytes-gpt --set size=tiny              a language model, in a minute on a CPU
    spartan train digits --set method=imp --set optimizer.lr=0.05 --out runs/imp
    spartan train digits --set 'method_args={beta: [1, 20]}'
    spartan train resnet50-imagenet --show > mine.yaml   every key, to edit; then: spartan train mine.yaml
    spartan train --resume runs/imp                      after Ctrl-C, a kill or a power cut
    spartan train --resume runs/imp --set device=cpu     … elsewhere: keys that change nothing of the result
    torchrun --nproc-per-node=8 -m spartan train resnet50-imagenet --out runs/r50   the same run on eight GPUs

    The folder gets the resolved recipe, versions, metrics.jsonl, TensorBoard events, checkpoints, model.safetensors,
    summary.json and report.html. Every mistake in a recipe is found before the folder is made.

    A recipe takes any method: --set method=rigl brings RigL's own arguments, budget, warm-up and finetuning, and drops
    the recipe's method_args, budget, warmup and finetune, but for those that --set gives too. One line says which.
    """
    from spartan.app.runs import read_run, result_line
    from spartan.app.train import loop
    from spartan.app.train.config import RecipeError, load_with_note, to_yaml
    from spartan.app.train.folder import check_resume_settings, choose_folder
    from spartan.app.train.processes import end_with_parent, joined

    end_with_parent()
    if resume is not None:
        given = [n for n, v in {"RECIPE": recipe, "--out": out, "--show": show}.items() if v]
        if given:
            raise RecipeError(f"--resume continues a run as it was started; it cannot be combined with {given[0]}")
        check_resume_settings(sets or [])
    name = recipe or "digits"
    asked, note = load_with_note(name, sets or ()) if resume is None else (None, "")
    if show and asked is not None:
        if note:
            typer.echo(note, err=True)  # not into the YAML
        typer.echo(to_yaml(asked), nl=False)
        return

    with joined() as us:
        # torchrun has started processes again after one of its group died.
        again = any(us.gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0))

        def choose() -> "tuple[Path, Config | None, dict[str, Any] | None]":
            """The folder, the recipe of a run that is new, and the results of one that is finished."""
            folder, there = (resume or Path(), True) if asked is None else choose_folder(name, asked, out, again)
            return folder, None if there else asked, read_run(folder).summary if there else None

        # The first process's word counts for all: on another machine the folder may not have been there, or is by now.
        folder, new, summary = us.decide(choose)
        if summary is not None:
            if us.first:
                typer.echo(f"{folder} is finished: {result_line(summary)}")
            return
        on = "" if us.alone else f" on {us.world} processes"
        about = f"{new.method} at sparsity {new.sparsity:g}, {new.epochs} epochs" if new else ""
        if us.first and not quiet:
            typer.echo(f"{name}: {about}{on} -> {folder}" if new else f"continuing {folder}{on}")
            if new and note:
                typer.echo(note)
        if new is None:
            summary = loop.resume(folder, sets or [] if resume else [], quiet=quiet)
        else:
            summary = loop.train(new, folder, quiet=quiet, command=["spartan", *sys.argv[1:]])
        if us.first:
            page = try_report(folder)
            typer.echo(f"{folder}: {result_line(summary)}" + (f"; report: {page}" if page else ""))


def sweep(
    recipe: Annotated[str, Argument(metavar="RECIPE", help="A built-in recipe or a .yaml file.")],
    sets: Annotated[
        list[str] | None,
        Option("--set", "-s", metavar="KEY=A,B,…", help="Values to try; one in brackets or braces counts as one."),
    ] = None,
    seeds: Annotated[int | None, Option(metavar="N", help="Seeds 0 to N-1 of each.  [default: 1]")] = None,
    jobs: Annotated[int, Option(metavar="N", min=1, help="How many runs at once.")] = 1,
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Where the runs go.  [default: runs/<recipe>-sweep]")
    ] = None,
) -> None:
    """Run a grid of settings and compare them.

    At the end come the table of `spartan compare` and a report for the whole folder. The same command again does what
    is missing: finished runs are skipped, unfinished ones continued, failed ones tried again. A failing run does not
    stop the others; it is named at the end, and the exit code is 1. A changed method comes with its own arguments,
    budget and phases, as in `spartan train`.

    \b
    spartan sweep digits --set method=spartan,topkast,imp --set sparsity=.9,.95,.98 --seeds 3
    spartan sweep cifar10-wrn22 --set 'method_args={beta: [1, 5]},{beta: [1, 10]}' --seeds 3 --jobs 4
    """
    from spartan.app.report.compare import print_comparison
    from spartan.app.runs import find_runs
    from spartan.app.terminal import is_plain
    from spartan.app.train.sweep import Sweep, SweepDisplay, plan

    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ValueError("sweep: it starts processes of its own; start it once, without torchrun")
    folder = out or Path("runs") / f"{Path(recipe).stem}-sweep"
    planned = plan(recipe, sets or [], seeds, folder)
    sweeper = Sweep(folder, min(jobs, len(planned)))
    with SweepDisplay(planned, is_plain()) as display:
        display.line(f"{len(planned)} runs, {sweeper.at_once} at once -> {folder}")
        for note in filter(None, dict.fromkeys(job.note for job in planned)):
            display.line(note)
        outcomes = sweeper.run(planned, display)
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    if folder.is_dir() and any(o.state in ("finished", "skipped") for o in outcomes):
        print_comparison(find_runs([folder]))
        if page := try_report(folder):
            typer.echo(f"report: {page}")
    for outcome in failed:
        typer.echo(f"failed: {outcome.job.folder} ({' '.join(outcome.job.sets)}): {outcome.reason}", err=True)
    if sweeper.stopped:
        typer.echo("stopped; the same command goes on where it stopped", err=True)
        raise typer.Exit(130)
    if failed:
        typer.echo(f"{len(failed)} of {len(planned)} runs failed; the same command tries them again", err=True)
        raise typer.Exit(1)


def evaluate(
    target: Target,
    recipe: Annotated[
        str | None, Option(metavar="RECIPE", help="For a FILE: the recipe that says which model and data.")
    ] = None,
    sets: Sets = None,
) -> None:
    """Measure a trained model on its test data.

    \b
    spartan evaluate runs/imp
    spartan evaluate runs/imp --set data.path=elsewhere/cifar10.npz --set device=cpu
    spartan evaluate model.safetensors --recipe cifar10-wrn22
    """
    from spartan.app.runs import BITS, number
    from spartan.app.train import loop
    from spartan.app.trained import fill_model, load_trained

    config, weights, summary = load_trained(target, recipe, sets or ())
    file = target / "model.safetensors" if target.is_dir() else target
    scores = loop.evaluate(config, lambda model: fill_model(model, config, weights, file))
    # Of the weights that a run counted; without its summary, of the tensors that can be sparse.
    zeros = {name: int((w == 0).sum()) for name, w in weights.items() if w.ndim > 1}
    total, which = sum(weights[name].numel() for name in zeros), "weights in tensors of 2 or more dimensions"
    if summary is not None:
        counted = [layer["name"] for layer in summary["layers"]]
        if not set(counted) <= set(zeros) or number(summary["parameters"]) is None:
            raise ValueError(f"{target / 'summary.json'} is damaged: its layers are not those of model.safetensors")
        zeros = {name: zeros[name] for name in counted}
        total, which = int(summary["parameters"]), "counted weights"
    nonzero = total - sum(zeros.values())
    if BITS.key in scores:
        typer.echo(f"bits      {scores[BITS.key]:.4f} per byte")
    typer.echo(f"top-1     {scores['top1']:.2%}")
    typer.echo(f"top-5     {scores['top5']:.2%}")
    typer.echo(f"loss      {scores['test_loss']:.4f}")
    typer.echo(f"sparsity  {1 - nonzero / max(1, total):.2%}")
    typer.echo(f"nonzero   {nonzero:,} of {total:,} {which}")


def compare(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Run folders, or folders that contain runs.")],
    csv: Annotated[Path | None, Option(metavar="FILE", help="One line a run, unrounded.")] = None,
    markdown: Annotated[Path | None, Option(metavar="FILE", help="The table as Markdown.")] = None,
    plot: Annotated[
        Path | None, Option(metavar="FILE.png", help="Accuracy, or bits per byte, against sparsity.")
    ] = None,
) -> None:
    """Compare runs, with means over seeds.

    Runs that differ in their seed only make one line: last-epoch top-1, or bits per byte of text, as mean ± sample
    standard deviation, and every seed's own. Unfinished runs are named and not averaged.

    \b
    spartan compare runs
    spartan compare runs/sweep --markdown table.md --csv runs.csv --plot curve.png
    """
    from spartan.app.report import compare as tables
    from spartan.app.runs import find_runs

    found = find_runs(runs)
    rows = tables.rows_of(found)
    for path in (csv, markdown, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")
    if (csv or markdown or plot) and not rows:
        raise ValueError(f"none of the {len(found)} runs is finished; there is nothing to write")
    for path, write in ((csv, tables.to_csv), (markdown, tables.to_markdown)):
        if path is not None:
            path.write_text(write(rows), "utf-8")
    if plot is not None:
        tables.plot(rows, plot)
    tables.print_comparison(found)


def report(
    target: Annotated[Path, Argument(metavar="RUN|DIR", help="A run folder, or a folder of runs.")],
    open_it: Annotated[bool, Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Write the report of a run or a folder of runs.

    One self-contained HTML page; its path is printed.
    """
    from spartan.app.report.page import write_report

    page = write_report(target)
    typer.echo(str(page))
    if open_it:
        webbrowser.open(page.resolve().as_uri())


def try_report(folder: Path) -> Path | None:
    """The report, whose failure must not make a finished run look like a failed one."""
    from spartan.app.report.page import write_report

    try:
        return write_report(folder)
    except Exception as error:
        typer.echo(f"warning: no report was written ({type(error).__name__}: {error})", err=True)
        return None


COMMANDS = (train, recipes, methods, evaluate, compare, sweep, report)
