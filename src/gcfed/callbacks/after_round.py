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
from gcfed.folders.measures import DECAY, WINDOW


def why_stopped(callbacks: Iterable[Callback]) -> str:
    """Why early stopping has ended the run; "" if it has not."""
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
            return callback.stopping_reason_message.removesuffix(" Signaling Trainer to stop.")
    return ""


class EarlyStop(EarlyStopping):
    """Lightning's early stopping.

    A stopped run continues if it is resumed with a larger patience.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # the setting may have changed
        super().load_state_dict(state_dict | {"patience": self.patience})
        was_impatient = self.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED
        if was_impatient and self.wait_count < self.patience:
            self.stopping_reason_message = None


class _Counting(Tqdm):
    """A bar that counts and is not drawn: each drawing would add to a file."""

    def display(self, *_: Any, **__: Any) -> None: ...


class RoundProgressBar(TQDMProgressBar):
    """Lightning's progress bar, with one bar for all rounds.

    In a file, such as that of a batch job, it is a line for each tenth of the rounds.
    """

    TIMES = "[{elapsed}<{remaining}, {rate_fmt}{postfix}]"
    BAR_FORMAT = f"Round {{n_fmt}}/{{total_fmt}} |{{bar}}| {TIMES}"
    LINE_FORMAT = f"Round {{n_fmt}}/{{total_fmt}} {TIMES}"
    _bar: Tqdm | None = None
    _printed = 0  # tenths of the rounds

    def init_train_tqdm(self) -> Tqdm:
        is_drawn = sys.stdout.isatty()
        kind = Tqdm if is_drawn else _Counting
        self._printed = self._tenths(self.trainer.global_step)
        self._bar = kind(
            initial=self.trainer.global_step,
            total=self.trainer.max_steps,
            bar_format=self.BAR_FORMAT if is_drawn else self.LINE_FORMAT,
            disable=self.is_disabled,
            file=sys.stdout,
            dynamic_ncols=True,
            smoothing=0,
        )
        return self._bar

    def on_train_epoch_start(self, *_: Any) -> None: ...

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args[:-1], trainer.global_step - 1)  # type: ignore[call-arg]
        if isinstance(self._bar, _Counting) and not self._bar.disable:
            self._print_line(self._bar)

    def _print_line(self, bar: Tqdm) -> None:
        tenths = self._tenths(bar.n)
        if tenths > self._printed:
            print(bar, flush=True)
        self._printed = tenths

    def _tenths(self, rounds: int) -> int:
        return 10 * rounds // self.trainer.max_steps

    def on_exception(self, *_: Any) -> None:
        """Ends the bar's line, so that the error is the last one on the screen."""
        if self._bar is not None:
            self._bar.close()

    def get_metrics(self, trainer: Trainer, *_: Any) -> dict[str, Any]:
        shown = {}
        for column, label in (("train/loss", "loss"), ("test/acc", "acc")):
            if column in trainer.callback_metrics:
                shown[label] = f"{trainer.callback_metrics[column]:.3f}"
        return shown


class SmoothedAccuracy(ServerPart):
    """The accuracies that papers report: ``test/acc_smooth10``, the mean over ten rounds (GC-Fed),
    and ``test/acc_ema``, an exponential moving average (FedACG).
    """

    writes = (f"test/acc_smooth{WINDOW}", "test/acc_ema")

    def __init__(self) -> None:
        self.forget_states()

    def forget_states(self) -> None:
        super().forget_states()
        self.last: dict[int, float] = {}  # round → its test
        self.ema: float | None = None  # the first test starts it

    def on_round_end(self, row: dict[str, Any], round: Received) -> None:
        if "test/acc" not in row:
            return
        present = row["round"]
        accuracy = row["test/acc"]
        self.last[present] = accuracy
        for earlier in list(self.last):
            if earlier <= present - WINDOW:
                del self.last[earlier]
        if self.ema is None:
            self.ema = accuracy
        else:
            self.ema = DECAY * self.ema + (1 - DECAY) * accuracy
        row[f"test/acc_smooth{WINDOW}"] = sum(self.last.values()) / len(self.last)
        row["test/acc_ema"] = self.ema

    def state_dict(self) -> dict[str, Any]:
        return {"last": dict(self.last), "ema": self.ema}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last = dict(state_dict["last"])
        self.ema = state_dict["ema"]
