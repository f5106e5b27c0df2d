"""Chooses a run's folder and writes what belongs there when the run begins and when it ends."""

import datetime
import itertools
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import spartan
from spartan.app.runs import INCIDENTAL, INCIDENTAL_DATA, RunFolder, fixed_settings, is_finished, is_run
from spartan.app.train.config import Config, RecipeError, to_yaml
from spartan.app.train.processes import current
from spartan.app.train.text import Text
from spartan.disk import replace_file
from spartan.wording import shortened

if TYPE_CHECKING:
    from spartan.app.train.loop import Trainer

COMMIT = "SPARTAN_COMMIT"  # the commit that files without git are of


def run_name(recipe: str, config: Config) -> str:
    """What a run's folder is called when nobody says."""
    return f"{Path(recipe).stem}-{config.method}-{config.sparsity:g}-seed{config.seed}".replace("/", "_")


def choose_folder(recipe: str, config: Config, out: Path | None, again: bool) -> tuple[Path, bool]:
    """The folder of a run, and whether the run is there already, to be continued.

    It is `again` when torchrun starts its processes anew after one has died: then a folder with a run of the very same
    recipe is continued, the one asked for or the last unfinished one under the usual name. Anybody else has to ask for
    it with --resume. Where the usual name is taken, the folder is the first of name-2, name-3, … that is not.
    """
    if out is None:
        usual = Path("runs") / run_name(recipe, config)
        mine = [p for p in usual.parent.glob(f"{usual.name}*") if again and _same_run(p, config) and not is_finished(p)]
        if mine:
            return max(mine, key=lambda p: (p / "recipe.yaml").stat().st_mtime_ns), True
        names = (f"{usual.name}-{i}" if i > 1 else usual.name for i in itertools.count(1))
        return next(folder for folder in map(usual.with_name, names) if not folder.exists()), False
    if not is_run(out) or (again and _same_run(out, config)):
        return out, is_run(out)
    raise RecipeError(f"--out: {out} holds a run already; continue it with --resume {out}, or choose another folder")


def _same_run(folder: Path, config: Config) -> bool:
    with suppress(RecipeError):  # a damaged recipe is no run of this one
        return is_run(folder) and RunFolder(folder).config == config
    return False


def check_resume_settings(sets: Sequence[str]) -> None:
    """A run that goes on may change where and how it is done, not what it computes."""
    free = [*INCIDENTAL, *(f"data.{key}" for key in INCIDENTAL_DATA)]
    for key in (shortened(setting.partition("=")[0].strip()) for setting in sets):
        if key not in free:
            raise RecipeError(
                f"--resume continues a run as it was started; it cannot be combined with --set {key}, but with --set of "
                f"{', '.join(free)}"
            )


def create(
    out: Path, config: Config, device: torch.device, command: list[str], data: Mapping[str, Any] | None = None
) -> None:
    """Make the folder with its recipe and environment, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}.{os.urandom(4).hex()}")
    aside.mkdir()
    try:
        replace_file(aside / "recipe.yaml", to_yaml(config).encode())
        facts = environment(device, command) | ({"data": dict(data)} if data else {})
        replace_file(aside / "environment.json", json.dumps(facts, indent=1).encode())
        (aside / "checkpoints").mkdir()
        try:
            if out.exists():
                out.rmdir()  # empty, as was checked
            aside.rename(out)
        except OSError as error:
            if is_run(out):  # by now: it was empty when the run was asked for
                raise RecipeError(f"--out: {out} was taken meanwhile by another start; choose another folder") from None
            raise error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def check_recipe(out: Path, config: Config, checkpoint: str, saved: Mapping[str, Any]) -> None:
    """RecipeError where recipe.yaml is no longer what a checkpoint was trained with."""
    now = fixed_settings(config)
    for key in now | dict(saved):
        before, after = json.dumps(saved.get(key)), json.dumps(now.get(key))
        if before != after and saved.get(key) != now.get(key):
            raise RecipeError(
                f"{out / 'recipe.yaml'}: {key} is {shortened(after)}, but the run was trained with {shortened(before)} up "
                f"to {checkpoint}; put it back, or begin another run: spartan train {out / 'recipe.yaml'} --out NEW"
            )


def check_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """RecipeError where the data are no longer what a checkpoint was trained with."""
    if saved.get("sha256") != now.get("sha256"):
        raise RecipeError(
            f"data.path: {now['text']} is not the text that the run was trained with ({saved.get('bytes', 0):,} bytes in "
            f"{saved.get('files', 0):,} files then, {now['bytes']:,} in {now['files']:,} now, or others); put it back, name "
            "it with --set data.path=…, or begin another run"
        )


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep a second process out of a run folder; the lock dies with the process that holds it."""
    if os.name != "posix":
        yield
        return
    import fcntl

    with (out / ".lock").open("w") as file:
        try:
            # Not flock, which data-loading workers would inherit and hold on to after their parent was killed.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RecipeError(f"{out} is being trained by another process; wait for it, or stop it first") from None
        yield


def environment(device: torch.device, command: list[str]) -> dict[str, Any]:
    """Versions, commit and machine kind."""
    versions = {"spartan": spartan.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("torchvision", "timm", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "command": command,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        "host_cores": os.cpu_count(),
        "processes": current().world,
        "versions": versions,
    }


def commit(dirty: bool = False) -> str | None:
    """The commit of the library's checkout, if it runs from one, or what SPARTAN_COMMIT says that it is a copy of.

    With `dirty` it is short, and marked if files are not as they were committed.
    """
    if named := os.environ.get(COMMIT):
        return named
    ask = ["git", "-C", str(Path(__file__).parent)]
    ask += ["describe", "--always", "--dirty", "--exclude=*"] if dirty else ["rev-parse", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(ask, stderr=subprocess.DEVNULL, text=True, timeout=10).strip()
    return None


def samples(model: torch.nn.Module, data: Text, count: int = 3, length: int = 256) -> list[dict[str, str]]:
    """What a language model makes of some test prompts; [] for one that cannot generate."""
    generate = getattr(model, "generate", None)
    if generate is None:
        return []
    prompts = data.prompts(count, min(64, data.shape[0])).to(next(model.parameters()).device)
    generator = torch.Generator(prompts.device).manual_seed(data.config.seed)
    written = generate(prompts, length, temperature=0.8, generator=generator)[:, prompts.shape[1] :]
    texts = ([bytes(line.tolist()).decode("utf-8", "replace") for line in part.cpu()] for part in (prompts, written))
    return [{"prompt": prompt, "text": text} for prompt, text in zip(*texts, strict=True)]


def finish(out: Path, trainer: "Trainer", record: dict[str, Any]) -> dict[str, Any]:
    """The final model, the masks and, last of all, the summary: a run with a summary is finished."""
    sparsifier = trainer.sparsifier  # every process ends its own and gives what it holds of the model; the first writes
    layers = [vars(layer) | {"shape": list(layer.shape)} for layer in sparsifier.layers()]
    sparsifier.finalize()
    sparsifier.detach()
    model = trainer.parallel.gathered_model(trainer.build_model)
    if model is None:
        return {}
    config, data = trainer.config, trainer.data
    reference = {"model": config.model, "classes": data.classes, "shape": list(data.shape), "args": config.model_args}
    try:
        packed_bytes = spartan.save(model, out / "model.safetensors", architecture=reference)
    except ValueError:  # a model that its own name does not lead to again must not cost a whole run
        packed_bytes = spartan.save(model, out / "model.safetensors")
    if trainer.masks:
        bits = np.stack([np.packbits(m.numpy()) for m in trainer.masks])
        with (out / "masks.npz").open("wb") as file:
            np.savez_compressed(file, bits=bits, n=trainer.masks[0].numel())
    counted = sum(layer["parameters"] for layer in layers)
    nonzero = sum(layer["kept"] for layer in layers)
    parameters = sum(p.numel() for p in model.parameters())
    everything = parameters if config.count == "model" else counted
    count = spartan.flops(model, data.example(next(model.parameters()).device))
    measured = ("top1", "top5", "test_loss", "bits_per_byte", "train_loss", "seconds", "images_per_s", "density")
    summary = {
        "method": config.method,
        "sparsity": config.sparsity,
        "seed": config.seed,
        **{key: record[key] for key in measured if key in record},
        "epochs": config.epochs,
        "steps": trainer.step,
        "achieved_sparsity": (counted - nonzero) / everything,
        "nonzero": nonzero,
        "parameters": everything,
        "model_parameters": parameters,
        "flops_dense": count.dense,
        "flops_sparse": count.sparse,
        "model_bytes": packed_bytes,
        "dense_bytes": sum(t.nbytes for t in model.state_dict().values()),
        "layers": layers,
        **({"samples": samples(model, data)} if isinstance(data, Text) else {}),
    }
    replace_file(out / "summary.json", json.dumps(summary, indent=1).encode())
    return summary
