"""Pictures for the loggers that accept them: TensorBoard's and W&B's."""

from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch.loggers import Logger


def show_picture(loggers: Iterable[Logger], picture: Path, rounds: int) -> None:
    """Gives a PNG file to the loggers after so many rounds.

    Its title there is the file's name up to the first ``_``.
    """
    title = picture.stem.split("_")[0]
    for logger in loggers:
        if hasattr(logger, "log_image"):
            logger.log_image(title, [str(picture)], step=rounds)
