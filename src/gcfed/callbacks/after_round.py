"""What callbacks share that look at a round when its row of metrics is complete."""

from typing import Any

from lightning.pytorch import Callback, Trainer

from gcfed.federated.loop import FederatedLoop
from gcfed.federated.method import Part


class AfterRound(Callback):
    """Calls :meth:`after_round` once a round, when it is over with its test and the loggers have its row."""

    _seen: dict[str, Any] | None = None  # the last row

    def after_round(self, trainer: Trainer, row: dict[str, Any]) -> None:
        raise NotImplementedError

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._look(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        loop = FederatedLoop.of(trainer)
        if loop.last_row is not self._seen and not loop.row:  # else the round is still to be tested
            self._seen = loop.last_row
            self.after_round(trainer, loop.last_row)


def measured(trainer: Trainer, row: dict[str, Any], key: str, column: str) -> float | None:
    """A column of the round's row; None where this round has none.

    Raises:
        ValueError: no round has it: this one is tested, and nothing is measured in some rounds only. Names the ``key``.
    """
    sparse = any(isinstance(part, Part) and getattr(part, "every", 1) > 1 for part in trainer.callbacks)  # type: ignore[attr-defined]
    if column not in row and FederatedLoop.of(trainer).tested(row["round"]) and not sparse:
        raise ValueError(f"{key}={column} is no column of this run; there are {', '.join(row)}.")
    return float(row[column]) if column in row else None
