"""Lightning's loggers for Weights & Biases and MLflow. A resumed run continues its run there.

The ids of these runs are in files of the run's folder. ``resume_round``: the last round of the
checkpoint that the run continues; 0 for a run that begins, which gets a new id.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from gcfed.utils.files import write_text

WANDB_ID = "wandb_id.txt"
MLFLOW_ID = "mlflow_id.txt"


class RunWandbLogger(WandbLogger):
    """``id``: W&B's id of the run; None takes that of the run to be continued."""

    def __init__(
        self, save_dir: str, id: str | None = None, resume_round: int = 0, **options: Any
    ) -> None:
        self.id_file = Path(save_dir) / WANDB_ID
        if id is None and resume_round:
            id = read_id(self.id_file)
        super().__init__(save_dir=save_dir, id=id, **options)

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Starts the run at W&B, and keeps its id."""
        super().log_hyperparams(params)
        write_text(self.id_file, f"{self.experiment.id}\n")

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Ends the run at W&B. Without this, all runs of a sweep would end with its process."""
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)


class RunMLFlowLogger(MLFlowLogger):
    """``save_dir``: the run's folder. ``run_id``: MLflow's id of the run; None takes that of the
    run to be continued.
    """

    def __init__(
        self, save_dir: str, run_id: str | None = None, resume_round: int = 0, **options: Any
    ) -> None:
        self.id_file = Path(save_dir) / MLFLOW_ID
        if run_id is None and resume_round:
            run_id = read_id(self.id_file)
        super().__init__(run_id=run_id, **options)
        self.goes_on = run_id is not None

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Starts the run at MLflow, and keeps its id.

        A continued run has its parameters already. MLflow allows no change of ``rounds``.
        """
        if not self.goes_on:
            super().log_hyperparams(params)
        write_text(self.id_file, f"{self.run_id}\n")


def read_id(file: Path) -> str | None:
    """The id in a file; None if there is no such file."""
    return file.read_text().strip() or None if file.is_file() else None
