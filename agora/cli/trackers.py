"""Trackers that get the rows of a run's metrics: TensorBoard, Weights & Biases, MLflow, each by its own package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agora.cli import console

if TYPE_CHECKING:
    from agora.observe.metrics import Row

KINDS = ("tensorboard", "wandb", "mlflow")
MAX_BATCH = 1000  # metrics that MLflow takes at a time


class TrackerFailed(Exception):
    """Raised when a tracker does not take a row now; it is worth trying again."""


class Tracker(Protocol):
    """What rows are sent to, the oldest first. A row that was sent before may come again after a crash."""

    def send(self, row: Row) -> None:
        """Raises TrackerFailed."""

    def flush(self) -> None:
        """Returns when what was sent is safe."""

    def close(self) -> None: ...


def open_tracker(target: str, run: str, name: str) -> Tracker:
    """Opens KIND or KIND:PLACE, so that a later opening of the same goes on where this one ended.

    PLACE: a folder for TensorBoard, a project for Weights & Biases, a tracking URI for MLflow. run, name: the run's id
    and name. Raises Failure for another kind, and for a package that is not installed.
    """
    kind, _, place = target.partition(":")
    if kind not in KINDS or (kind == "tensorboard" and not place):
        raise console.Failure(
            f"--to {target} is no tracker; give tensorboard:DIR, wandb, wandb:PROJECT, mlflow or mlflow:URI",
            console.EXIT_USAGE,
        )
    if importlib.util.find_spec(kind) is None:
        raise console.Failure(f"the package of {kind} is missing; run: pip install 'agora-swarm[{kind}]'")
    match kind:
        case "tensorboard":
            return _TensorBoard(Path(place), name, run)
        case "wandb":
            return _WeightsAndBiases(place or "agora", name, run)
    return _MLflow(place or None, name, run)


class _TensorBoard:
    def __init__(self, folder: Path, name: str, run: str) -> None:
        from tensorboard.summary import Writer

        self._writer: Any = Writer(str(folder / f"{name}-{run[:12]}"))

    def send(self, row: Row) -> None:
        for tag, value in row.metrics.items():
            self._writer.add_scalar(tag, value, row.step, wall_time=row.unix)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, project: str, name: str, run: str) -> None:
        import wandb

        # The id is the run's own: whoever tracks it, and after every restart, it is one run there.
        self._run: Any = wandb.init(project=project, name=name, id=run[:32], resume="allow", config={"agora_run": run})
        self._run.define_metric("*", step_metric="step")

    def send(self, row: Row) -> None:
        self._run.log({**row.metrics, "step": row.step, "unix_seconds": row.unix})

    def flush(self) -> None:
        pass  # its own process keeps what was logged on disk, and sends it

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, uri: str | None, name: str, run: str) -> None:
        import mlflow

        self._make_metric: Any = mlflow.entities.Metric
        self._error: type[Exception] = mlflow.exceptions.MlflowException
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        try:
            known = self._client.get_experiment_by_name("agora")
            experiment = known.experiment_id if known is not None else self._client.create_experiment("agora")
            found = self._client.search_runs([experiment], f"tags.`agora.run` = '{run}'", max_results=1)
            made = found[0] if found else self._client.create_run(experiment, run_name=name, tags={"agora.run": run})
        except self._error as error:
            raise console.Failure(f"MLflow cannot be used ({error}); check --to mlflow:URI") from None
        self._id: str = made.info.run_id

    def send(self, row: Row) -> None:
        at_ms = int(row.unix * 1000)
        metrics = [self._make_metric(tag, value, at_ms, row.step) for tag, value in row.metrics.items()]
        try:
            for start in range(0, len(metrics), MAX_BATCH):
                self._client.log_batch(self._id, metrics=metrics[start : start + MAX_BATCH])
        except self._error as error:
            raise TrackerFailed(str(error).splitlines()[0]) from None

    def flush(self) -> None:
        pass  # log_batch returns when the store has them

    def close(self) -> None:
        pass  # the run goes on, there too
