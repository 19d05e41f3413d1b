"""Callbacks that run after each round, when it has been tested and the loggers have its row of metrics."""

import sys
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, TQDMProgressBar
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from gcfed.federated.loop import FederatedLoop
from gcfed.federated.method import Part, ServerPart
from gcfed.federated.received import Received
from gcfed.runs.measures import DECAY, WINDOW


class AfterRound(Callback):
    """Calls :meth:`after_round` once a round."""

    _last = 0  # the round that was seen last

    def after_round(self, trainer: Trainer, row: dict[str, Any]) -> None: ...

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        loop = FederatedLoop.of(trainer)
        if not loop.row and loop.last_row.get("round", 0) != self._last:  # else the round is not tested yet
            self._last = loop.last_row["round"]
            self.after_round(trainer, loop.last_row)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.on_train_batch_end(trainer)


def monitored(trainer: Trainer, row: dict[str, Any], monitor: str) -> bool:
    """Whether the row has the column ``monitor``. It is then in ``trainer.callback_metrics``, where Lightning looks.

    Raises:
        ValueError: the row is complete and lacks the column, and no metric is measured in some rounds only.
    """
    if monitor in row:
        trainer.callback_metrics[monitor] = torch.tensor(row[monitor])
    elif "test/loss" in row and all(getattr(c, "every", 1) == 1 for c in trainer.callbacks if isinstance(c, Part)):  # type: ignore[attr-defined]
        raise ValueError(f"monitor={monitor} is no column of this run. There are {', '.join(row)}.")
    return monitor in row


class EarlyStop(AfterRound, EarlyStopping):
    """Lightning's, by any column, in tested rounds. A run that it stops is finished; more patience continues it."""

    @property
    def stopped(self) -> str:
        """Why the run is over; "" if it is not."""
        return (self.stopping_reason_message or "").removesuffix(" Signaling Trainer to stop.")

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or bool(self.stopped)

    def after_round(self, trainer: Trainer, row: dict[str, Any]) -> None:
        if FederatedLoop.of(trainer).tested(row["round"]) and monitored(trainer, row, self.monitor):
            self._run_early_stopping_check(trainer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})  # the setting may have changed
        if self.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED and self.wait_count < self.patience:
            self.stopping_reason_message = None


class RoundProgressBar(TQDMProgressBar):
    """Lightning's, with one bar over all rounds and none for a test."""

    BAR_FORMAT = "Round {n_fmt}/{total_fmt} |{bar}| [{elapsed}<{remaining}, {rate_fmt}{postfix}]"

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.train_progress_bar = Tqdm(
            total=trainer.max_steps, initial=trainer.global_step, disable=self.is_disabled, dynamic_ncols=True,
            file=sys.stdout, smoothing=0, bar_format=self.BAR_FORMAT,
        )  # fmt: skip

    def on_train_epoch_start(self, *_: Any) -> None:
        """Lightning's begins the bar again."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args[:-1], trainer.global_step - 1)  # type: ignore[call-arg]

    def init_validation_tqdm(self) -> Tqdm:
        return Tqdm(disable=True)

    def get_metrics(self, trainer: Trainer, *_: Any) -> dict[str, Any]:
        row = FederatedLoop.of(trainer).last_row
        return {name.split("/")[1]: f"{row[name]:.3f}" for name in ("train/loss", "test/acc") if name in row}


class SmoothedAccuracy(ServerPart):
    """What tables report: ``test/acc_smooth10``, the mean over ten rounds (GC-Fed), and ``test/acc_ema`` (FedACG)."""

    def __init__(self) -> None:
        self.last: dict[int, float] = {}  # round → its test
        self.ema: float | None = None  # the first test starts it

    def on_round_end(self, row: dict[str, Any], round: Received) -> None:
        if "test/acc" not in row:
            return
        t, acc = row["round"], row["test/acc"]
        self.last = {s: a for s, a in self.last.items() if s > t - WINDOW} | {t: acc}
        self.ema = acc if self.ema is None else DECAY * self.ema + (1 - DECAY) * acc
        row[f"test/acc_smooth{WINDOW}"] = sum(self.last.values()) / len(self.last)
        row["test/acc_ema"] = self.ema

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last, "ema": self.ema}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last, self.ema = dict(state_dict["last"]), state_dict["ema"]
