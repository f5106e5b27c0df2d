"""Shows metrics where people watch runs: TensorBoard, Weights & Biases, MLflow. A resumed run continues its record."""

import contextlib
import json
import math
import os
import sys
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from spartan.app.train.recipe_text import RecipeError
from spartan.disk import replace_file
from spartan.wording import first_line

RECORD = "tracker.json"  # in a run's folder: which record is its own
MOST = 500  # metrics that MLflow is sent at once; it takes 1,000


class Tracker(Protocol):
    """What shows metrics."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Show these numbers of a step."""

    def flush(self) -> None:
        """Send what has been kept back."""

    def close(self, finished: bool) -> None:
        """End the record for now; `finished` if the run has come to its end."""


def trackers(name: str, folder: Path, recipe: Mapping[str, Any]) -> list[Tracker]:
    """TensorBoard, where it is installed, and what the recipe names: "none", "wandb" or "mlflow"."""
    found: list[Tracker] = []
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(ImportError):
        found.append(TensorBoardTracker(folder))
    kinds: dict[str, type[WandbTracker] | type[MLflowTracker]] = {"wandb": WandbTracker, "mlflow": MLflowTracker}
    if name in kinds:
        check_installed(name)
        found.append(kinds[name](folder, recipe))
    return found


def check_installed(name: str) -> None:
    """RecipeError where a recipe's tracker is not installed."""
    try:
        if name == "wandb":
            import wandb  # noqa: F401
        elif name == "mlflow":
            import mlflow  # noqa: F401
    except ImportError as error:
        hint = "pip install 'spartan-sparsity[trackers]'"
        raise RecipeError(f"tracker: {name} cannot be imported ({error}): {hint}; or set it to none") from None


def _record(folder: Path, name: str) -> str | None:
    """The record that a run began there; None where it has none of this tracker."""
    try:
        saved = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return saved.get("id") if isinstance(saved, dict) and saved.get("tracker") == name else None


def _remember(folder: Path, name: str, record: str) -> None:
    replace_file(folder / RECORD, json.dumps({"tracker": name, "id": record}).encode())


class TensorBoardTracker:
    """Event files in the run's folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Show these numbers of a step."""
        for key, value in values.items():
            self._board.add_scalar(key, value, step)

    def flush(self) -> None:
        """Send what has been kept back."""
        self._board.flush()

    def close(self, finished: bool) -> None:
        """End the record for now."""
        self._board.close()


class WandbTracker:
    """Weights & Biases; offline where WANDB_MODE says so, or where nobody is logged in.

    `wandb sync` sends what was kept offline; parts of a resumed run have one id, and become one record.
    """

    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        import wandb

        record = _record(folder, "wandb")
        known = record or uuid.uuid4().hex[:8]
        _remember(folder, "wandb", known)
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "spartan"), name=folder.resolve().name, id=known, dir=str(folder),
            config=dict(recipe), mode=mode, resume="allow" if record and mode == "online" else None,
            settings=wandb.Settings(silent=True),
        )  # fmt: skip
        # By a number of ours: what a killed run has shown after its last checkpoint comes again.
        self._run.define_metric("*", step_metric="optimizer_step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Show these numbers of a step."""
        self._run.log({**values, "optimizer_step": step})

    def flush(self) -> None:
        """Nothing is kept back: the library has a process of its own."""

    def close(self, finished: bool) -> None:
        """End the record for now."""
        self._run.finish(exit_code=0 if finished else 1)


class MLflowTracker:
    """MLflow: at MLFLOW_TRACKING_URI, or in a file `mlflow.db` of the run's folder (`mlflow ui --backend-store-uri`)."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        with warnings.catch_warnings(action="ignore"):  # of libraries that it uses, among themselves
            from mlflow import MlflowClient
            from mlflow.entities import Param

            where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
            self._client = MlflowClient(tracking_uri=where)
            record = _record(folder, "mlflow")
            if record is None:
                name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "spartan")
                known = self._client.get_experiment_by_name(name)
                experiment = self._client.create_experiment(name) if known is None else known.experiment_id
                record = self._client.create_run(experiment, run_name=folder.resolve().name).info.run_id
                self._client.log_batch(record, params=[Param(k, str(v)[:500]) for k, v in recipe.items()])
                _remember(folder, "mlflow", record)
            self._client.update_run(record, status="RUNNING")
        self._id, self._pending = record, list[Any]()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep these numbers of a step until the next flush: each call to the server takes its time."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._pending += [Metric(key, float(value), now, step) for key, value in values.items()]

    def flush(self) -> None:
        """Send what has been kept back; a server that does not answer is no reason to end a run."""
        from mlflow.exceptions import MlflowException

        while self._pending:
            try:
                self._client.log_batch(self._id, metrics=self._pending[:MOST])
            except MlflowException as error:
                print(
                    f"warning: MLflow did not take {len(self._pending)} metrics: {first_line(error)}", file=sys.stderr
                )
                return  # they are sent with the next ones
            self._pending = self._pending[MOST:]

    def close(self, finished: bool) -> None:
        """End the record for now."""
        self.flush()
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


def shown(values: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, float]:
    """Those numbers that a tracker shows, under the kind of their record."""
    found = {key: values.get(key) for key in keys}
    return {f"{values['kind']}/{key}": v for key, v in found.items() if v is not None and math.isfinite(v)}
