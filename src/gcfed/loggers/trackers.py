"""Weights & Biases and MLflow: Lightning's loggers with a row a round, which is the x-axis, resumed in their run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from threading import Thread
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from gcfed.utils.checked import SettingError, Whole, checked, fits
from gcfed.utils.files import replacing
from gcfed.utils.instantiate import BuildError, installed

log = logging.getLogger(__name__)
LIMIT = 30  # seconds that a tracker has to answer
# What wandb.init and wandb.Settings call differently.
NAMES = {"name": "run_name", "notes": "run_notes", "tags": "run_tags", "group": "run_group", "job_type": "run_job_type"}


class _Remote(Logger):
    """A tracker that may not answer: before the first round that ends the run, since nothing is lost yet; later the run
    goes on without it, since ``metrics.csv`` has all.

    Its run begins with the first row, in the process that writes. ``<tracker>.id`` in the run's folder names it: a
    resumed run goes on in it, also where the folder has been moved, and one that starts anew does not.

    Args:
        resume_round: last finished round of the checkpoint that the run continues; 0 starts another of the tracker's.
        settings: those of Lightning's logger and, of W&B, of ``wandb.init``.

    Raises:
        ValueError: the package is not installed, does not know a setting or its value, or does not answer.
    """

    tracker = ""  # a package, an extra of ours, and its key under ``logger``
    _where = ""  # the setting that says where it is
    _begun = _gone = False
    _table: Mapping[str, Any] = {}  # of hyperparameters, until the run begins

    def _known_id(self, save_dir: str, resume_round: int) -> str | None:
        """The id of the tracker's run that this one continues; None for a new one."""
        installed(self.tracker, f"logger={self.tracker}")
        self._id_file = Path(save_dir, f"{self.tracker}.id")
        return self._id_file.read_text() if resume_round and self._id_file.is_file() else None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Lightning's, once the tracker's run has begun."""
        if not self._begun:
            self._begun = True
            self._do(self._begin, must=True)
            with replacing(self._id_file) as temporary:
                temporary.write_text(str(self.version))
        return super().experiment  # type: ignore[misc]

    def _begin(self) -> None: ...

    def _do(self, work: Callable[[], Any], *, must: bool = False) -> None:
        """Does it, until the tracker fails or does not answer in time.

        Raises:
            BuildError: it does, and the run ``must`` not begin without it.
        """
        if self._gone or not (reason := _within(LIMIT, work)):
            return
        key = f"logger.{self.tracker}"
        if must:
            raise BuildError(f"{key}{self._where}: {reason}. Make it answer, or leave it out by ~{key}.")
        self._gone = True
        log.warning("%s: %s. The run goes on without it; metrics.csv has all rounds.", key, reason)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._table = params


def _within(seconds: float, work: Callable[[], Any]) -> str:
    """Why it could not be done in so much time; "" if it was. What does not end is left to itself."""
    reasons = [f"no answer within {seconds:g} s"]

    def call() -> None:
        try:
            work()
            reasons.append("")
        except Exception as error:  # whatever the tracker's library raises
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())}")

    thread = Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return reasons[-1]


@checked
class RoundWandbLogger(_Remote, WandbLogger):
    """Lightning's, but that W&B's threads begin after the run's processes were forked."""

    tracker = "wandb"

    def __init__(self, save_dir: str, resume_round: Whole = 0, **settings: Any) -> None:
        known = self._known_id(save_dir, resume_round)
        _check_wandb(settings)
        super().__init__(save_dir=save_dir, id=known, **settings)

    def _begin(self) -> None:
        import wandb

        wandb.finish()  # an earlier job of a sweep that was refused or failed
        run = self.experiment
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        run.config.update(dict(self._table), allow_val_change=True)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """One row a round; W&B drops a round that it has from before a kill."""
        run = self.experiment
        self._do(partial(run.log, dict(metrics), step=step, commit=True))

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Any) -> None:
        """Pictures go with the next row."""
        import wandb

        row = {key: [wandb.Image(image) for image in images], "round": step}
        self._do(lambda: self.experiment.log(row, commit=False))

    @rank_zero_only
    def log_summary(self, metrics: Mapping[str, float], step: int, *, success: bool) -> None:
        """The last figures of a run that has come to its end; ``success`` is false for one that diverged."""
        self._do(lambda: self.experiment.summary.update(dict(metrics)))
        if not self._gone:
            self.experiment.finish(exit_code=int(not success))  # what is to be sent yet may take long
            self._experiment = None

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if status == "failed" and self._experiment is not None and not self._gone:
            self._experiment.finish(exit_code=1)


def _check_wandb(settings: Mapping[str, Any]) -> None:
    import wandb

    fits("offline", settings.get("offline", False), bool)
    known = {*signature(WandbLogger.__init__).parameters, *signature(wandb.init).parameters}
    for name, value in settings.items():
        if name not in known:
            raise SettingError(name, f"={value} is no argument of wandb.init.")
        field = NAMES.get(name, name)
        try:
            if value is not None and field in wandb.Settings.model_fields:
                wandb.Settings(**{field: value})
        except Exception as error:  # its own, or pydantic's
            reason = error.errors()[0]["msg"] if hasattr(error, "errors") else error
            raise SettingError(name, f"={value}: {reason}.") from None


@checked
class RoundMLflowLogger(_Remote, MLFlowLogger):
    """Lightning's."""

    tracker = "mlflow"
    _logged = 0  # the last round that MLflow has

    def __init__(self, save_dir: str, resume_round: Whole = 0, **settings: Any) -> None:
        known = self._known_id(save_dir, resume_round)
        import mlflow.tracking  # noqa: F401  (takes seconds, for which no server is to blame)

        for name in ("experiment_name", "run_name", "tracking_uri"):
            if fits(name, settings.get(name), str | None) == "":
                raise SettingError(name, "='' is empty: give it a name, or leave it out.")
        self._where = f".tracking_uri={settings.get('tracking_uri')}"
        # It opens a database.
        self._do(partial(super().__init__, save_dir=None, run_id=known, **settings), must=True)

    def _begin(self) -> None:
        resumed, client = self._run_id is not None, self.experiment
        if resumed:
            self._logged = max((m.step for m in client.get_metric_history(self._run_id, "round")), default=0)
        else:
            MLFlowLogger.log_hyperparams(self, dict(self._table))  # its parameters cannot change

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """One row a round, without those that MLflow has from before a kill."""
        if self.experiment and (step is None or step > self._logged):
            self._do(partial(super().log_metrics, metrics, step))

    @rank_zero_only
    def log_summary(self, metrics: Mapping[str, float], step: int, *, success: bool) -> None:
        """The last figures of a run that has come to its end; ``success`` is false for one that diverged."""
        self._do(partial(super().log_metrics, metrics, step))
        self.finalize("success" if success else "failed")

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        if self._begun:
            self._do(partial(super().finalize, status))
