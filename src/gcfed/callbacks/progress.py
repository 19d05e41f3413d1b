"""How far a run has come."""

import io
import sys
import time
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from gcfed.callbacks.after_round import AfterRound
from gcfed.utils.checked import Weight, checked

BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
LINE = "{desc} {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


@checked
class RoundProgressBar(AfterRound):
    """Rounds done, time left, last loss and accuracy: a bar on a terminal, elsewhere a line every few seconds.

    Args:
        seconds: between two such lines.
    """

    def __init__(self, seconds: Weight = 5) -> None:
        self.seconds = seconds
        self._bar: Tqdm | None = None
        self._said = 0.0

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            terminal = sys.stdout.isatty()
            self._said = time.monotonic()
            self._bar = Tqdm(
                total=int(trainer.max_steps), initial=trainer.global_step, desc="Round", unit="round", smoothing=0,
                dynamic_ncols=True, file=sys.stdout if terminal else io.StringIO(),
                bar_format=BAR if terminal else LINE,
            )  # fmt: skip

    def on_train_end(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()

    def on_exception(self, *_: Any) -> None:
        self.on_train_end()

    def after_round(self, trainer: Trainer, row: dict[str, Any]) -> None:
        if self._bar is None:
            return
        figures = {name.split("/")[1]: f"{row[name]:.3f}" for name in ("train/loss", "test/acc") if name in row}
        self._bar.set_postfix(figures, refresh=False)
        self._bar.update(trainer.global_step - self._bar.n)
        over = trainer.global_step >= trainer.max_steps
        if not sys.stdout.isatty() and (over or time.monotonic() >= self._said + self.seconds):
            self._said = time.monotonic()
            print(self._bar, flush=True)
