"""Experiment trackers as sinks: Weights & Biases, MLflow, Trackio. Each is an extra, imported when it is opened.

A restart goes on in the tracker's own run, whose name stands in `trackers.json` of the run directory, and leaves out the
steps that the tracker has already.
"""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any
from uuid import uuid4

from samestep.monitor.record import Record
from samestep.monitor.sinks import RunInfo, scalars

__all__ = ["Mlflow", "Trackio", "Wandb"]


class _Tracker:
    """What the three share: a name that lasts, and the last step that was sent."""

    name = ""

    def open(self, info: RunInfo) -> None:
        """Begin, or go on behind the last step that the tracker has."""
        self._file = info.directory / "trackers.json"
        self._saved: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}
        if not info.step or self.name not in self._saved:
            self._saved[self.name] = {"id": uuid4().hex[:12]}
        self._mine: dict[str, Any] = self._saved[self.name]
        self._sent = int(self._mine.get("step", 0))
        self._begin(info, self._mine)
        self._remember()

    def _begin(self, info: RunInfo, mine: dict[str, Any]) -> None:
        raise NotImplementedError

    def _send(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def window(self, record: Record) -> None:
        """Send the curves' points."""
        if record.step > self._sent:
            self._send({name: value for name, value in scalars(record) if math.isfinite(value)}, record.step)
            self._sent = record.step

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Send logged values; note with a checkpoint how far the tracker is."""
        if kind == "log" and fields["step"] >= self._mine.get("logged", 0):
            values = {name: value for name, value in fields.items() if name not in ("epoch", "step")}
            self._send({name: value for name, value in values.items() if math.isfinite(value)}, fields["step"])
            self._mine["logged"] = fields["step"] + 1
        if kind in ("log", "checkpoint"):
            self._remember()

    def close(self) -> None:
        """Note how far the tracker is, and end."""
        self._remember()

    def _remember(self) -> None:
        self._mine["step"] = self._sent
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._saved))
        temporary.replace(self._file)


def _project(directory: Path) -> str:
    return directory.resolve().parent.name or "samestep"


class Wandb(_Tracker):
    """Weights & Biases; WANDB_MODE=offline, WANDB_PROJECT and the rest of its environment are obeyed."""

    name = "wandb"

    def _begin(self, info: RunInfo, mine: dict[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            id=mine["id"], resume="allow", name=info.directory.name, dir=str(info.directory), config=info.config
        )

    def _send(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        """End its run."""
        super().close()
        self._run.finish()


class Mlflow(_Tracker):
    """MLflow; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are obeyed."""

    name = "mlflow"

    def _begin(self, info: RunInfo, mine: dict[str, Any]) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        run = self._mlflow.start_run(run_id=mine.get("run"), run_name=info.directory.name)
        if "run" not in mine:
            self._mlflow.log_params(info.config)
            mine["run"] = run.info.run_id
        else:  # a killed start has sent more than it could note
            history = self._mlflow.MlflowClient().get_metric_history(mine["run"], "skipped")
            self._sent = max((point.step for point in history), default=self._sent)

    def _send(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(values, step=step)

    def close(self) -> None:
        """End its run."""
        super().close()
        self._mlflow.end_run()


class Trackio(_Tracker):
    """Trackio: local unless told otherwise by its environment."""

    name = "trackio"

    def _begin(self, info: RunInfo, mine: dict[str, Any]) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        name = f"{info.directory.name}-{mine['id']}"
        self._trackio.init(project=_project(info.directory), name=name, config=info.config, resume="allow")

    def _send(self, values: dict[str, float], step: int) -> None:
        self._trackio.log(values, step=step)

    def close(self) -> None:
        """End its run."""
        super().close()
        self._trackio.finish()
