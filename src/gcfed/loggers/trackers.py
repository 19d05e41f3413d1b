"""Weights & Biases and MLflow: Lightning's loggers with a row a round, which is the x-axis, resumed in their run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from gcfed.utils.files import replacing
from gcfed.utils.instantiate import installed
from gcfed.utils.number import number

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from wandb import Run


class RoundWandbLogger(WandbLogger):
    """Lightning's; its run begins with the first row, in the process that writes, since W&B's threads do not fork.

    Args:
        save_dir: the run's folder, where ``wandb/`` lies, and ``wandb.id``, by which a resumed run is found again.
        resume_round: last finished round of the checkpoint that the run continues; 0 starts another run of W&B's.
        settings: those of Lightning's logger and of ``wandb.init``.

    Raises:
        ValueError: W&B is not installed.
    """

    def __init__(self, save_dir: str, resume_round: int = 0, **settings: Any) -> None:
        installed("wandb", "logger=wandb")
        self._id_file = Path(save_dir, "wandb.id")
        known = _known_id(self._id_file, number("logger.wandb.resume_round", resume_round, 0, whole=True))
        super().__init__(save_dir=save_dir, id=known, **settings)
        self._table: dict[str, Any] = {}

    @property
    @rank_zero_experiment
    def experiment(self) -> Run:
        import wandb

        if self._experiment is None:
            wandb.finish()  # an earlier job of a sweep that was refused or failed
            run = super().experiment
            _write_id(self._id_file, run.id)
            run.define_metric("round")
            run.define_metric("*", step_metric="round")
            run.config.update(self._table, allow_val_change=True)
        return self._experiment  # type: ignore[return-value]

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Keeps the table until the run begins."""
        self._table = dict(vars(params) if isinstance(params, Namespace) else params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """One row a round; W&B drops a round that it has from before a kill."""
        self.experiment.log(dict(metrics), step=step, commit=True)

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Any) -> None:
        """Pictures go with the next row."""
        import wandb

        self.experiment.log({key: [wandb.Image(image) for image in images], "round": step}, commit=False)

    @rank_zero_only
    def log_summary(self, metrics: Mapping[str, float], step: int, *, success: bool) -> None:
        """The last figures of a run that has come to its end; ``success`` is false for one that diverged."""
        self.experiment.summary.update(dict(metrics))
        self.experiment.finish(exit_code=int(not success))
        self._experiment = None

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if status == "failed" and self._experiment is not None:
            self._experiment.finish(exit_code=1)


class RoundMLflowLogger(MLFlowLogger):
    """Lightning's; its run begins with the first row, in the process that writes.

    Args:
        save_dir: the run's folder, where ``mlflow.id`` lies, by which a resumed run is found again.
        resume_round: last finished round of the checkpoint that the run continues; 0 starts another run of MLflow's.
        settings: those of Lightning's logger.

    Raises:
        ValueError: MLflow is not installed.
    """

    def __init__(self, save_dir: str, resume_round: int = 0, **settings: Any) -> None:
        installed("mlflow", "logger=mlflow")
        self._id_file = Path(save_dir, "mlflow.id")
        known = _known_id(self._id_file, number("logger.mlflow.resume_round", resume_round, 0, whole=True))
        super().__init__(save_dir=None, run_id=known, **settings)
        self._table: dict[str, Any] = {}
        self._logged = 0

    @property
    @rank_zero_experiment
    def experiment(self) -> MlflowClient:
        if not self._initialized:
            resumed, client = self._run_id is not None, super().experiment
            assert self._run_id is not None
            if resumed:
                self._logged = max((m.step for m in client.get_metric_history(self._run_id, "round")), default=0)
            else:
                _write_id(self._id_file, self._run_id)
                super().log_hyperparams(self._table)
        return self._mlflow_client

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Keeps the table until the run begins; MLflow's parameters cannot change."""
        self._table = dict(vars(params) if isinstance(params, Namespace) else params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """One row a round, without those that MLflow has from before a kill."""
        if self.experiment and (step is None or step > self._logged):
            super().log_metrics(metrics, step)

    @rank_zero_only
    def log_summary(self, metrics: Mapping[str, float], step: int, *, success: bool) -> None:
        """The last figures of a run that has come to its end; ``success`` is false for one that diverged."""
        super().log_metrics(metrics, step)
        super().finalize("success" if success else "failed")


def _known_id(path: Path, resume_round: int) -> str | None:
    return path.read_text() if resume_round and path.is_file() else None


def _write_id(path: Path, run_id: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(run_id)
