"""TensorBoard in the run's own folder, resumed in place."""

from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger


def tensorboard_logger(save_dir: str, resume_round: int = 0) -> TensorBoardLogger:
    """Writes to ``<save_dir>/tensorboard``; a resumed run hides the rounds after its checkpoint."""
    purge: dict[str, Any] = {"purge_step": resume_round + 1} if resume_round else {}
    return TensorBoardLogger(save_dir, name="", version="tensorboard", default_hp_metric=False, **purge)
