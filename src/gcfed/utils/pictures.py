"""The one way from a picture in the run's folder to those who watch the run."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def show(loggers: Iterable[Any], name: str, path: Path, step: int) -> None:
    """Hands a PNG file to every logger that takes pictures: TensorBoard's, W&B's. ``step`` is the round."""
    for logger in loggers:
        if hasattr(logger, "log_image"):
            logger.log_image(name, [str(path)], step=step)
