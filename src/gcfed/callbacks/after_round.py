"""Callbacks that run after each round. They receive the round's row of metrics as ``outputs``."""

import sys
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, TQDMProgressBar
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from gcfed.federated.parts import ServerPart
from gcfed.federated.protocol.rounds import Received
from gcfed.runs.measures import DECAY, WINDOW


def why_stopped(callbacks: Iterable[Callback]) -> str:
    """Why early stopping has ended the run; "" if it has not."""
    reasons = (
        callback.stopping_reason_message
        for callback in callbacks
        if isinstance(callback, EarlyStopping)
    )
    return next(filter(None, reasons), "").removesuffix(" Signaling Trainer to stop.")


class EarlyStop(EarlyStopping):
    """Lightning's early stopping.

    A stopped run continues if it is resumed with a larger patience.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # the setting may have changed
        super().load_state_dict(state_dict | {"patience": self.patience})
        if (
            self.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED
            and self.wait_count < self.patience
        ):
            self.stopping_reason_message = None


class RoundProgressBar(TQDMProgressBar):
    """Lightning's progress bar, with one bar for all rounds."""

    BAR_FORMAT = "Round {n_fmt}/{total_fmt} |{bar}| [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
    _bar: Tqdm | None = None

    def init_train_tqdm(self) -> Tqdm:
        done, rounds = self.trainer.global_step, self.trainer.max_steps
        self._bar = Tqdm(
            initial=done,
            total=rounds,
            bar_format=self.BAR_FORMAT,
            disable=self.is_disabled,
            file=sys.stdout,
            dynamic_ncols=True,
            smoothing=0,
        )
        return self._bar

    def on_train_epoch_start(self, *_: Any) -> None: ...

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args[:-1], trainer.global_step - 1)  # type: ignore[call-arg]

    def on_exception(self, *_: Any) -> None:
        """Ends the bar's line, so that the error is the last one on the screen."""
        if self._bar is not None:
            self._bar.close()

    def get_metrics(self, trainer: Trainer, *_: Any) -> dict[str, Any]:
        last = trainer.callback_metrics
        return {
            name.split("/")[1]: f"{last[name]:.3f}"
            for name in ("train/loss", "test/acc")
            if name in last
        }


class SmoothedAccuracy(ServerPart):
    """Papers' accuracies: ``test/acc_smooth10``, the mean over ten rounds (GC-Fed), and
    ``test/acc_ema`` (FedACG).
    """

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
