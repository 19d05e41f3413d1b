"""What looks at a round when it is over with its test and the loggers have its row of metrics."""

import io
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from gcfed.federated.loop import FederatedLoop
from gcfed.federated.method import Part, ServerPart
from gcfed.federated.round import Received
from gcfed.runs.measures import DECAY, WINDOW
from gcfed.utils.checked import Count, Weight, checked
from gcfed.utils.resolvers import CONFIGS
from gcfed.utils.words import show

log = logging.getLogger(__name__)
BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
LINE = "{desc} {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class AfterRound(Callback):
    """Calls :meth:`after_round` once a round."""

    _seen: Mapping[str, Any] = {}  # the last row

    def after_round(self, trainer: Trainer, row: dict[str, Any]) -> None:
        raise NotImplementedError

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        loop = FederatedLoop.of(trainer)
        if loop.last_row != self._seen and not loop.row:  # else the round is still to be tested
            self._seen = loop.last_row
            self.after_round(trainer, loop.last_row)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.on_train_batch_end(trainer)


def measured(trainer: Trainer, row: dict[str, Any], key: str, column: str) -> float | None:
    """A column of the round's row; None where this round has none.

    Raises:
        ValueError: no round has it: this one is tested, and nothing is measured in some rounds only. Names the ``key``.
    """
    sparse = any(isinstance(part, Part) and getattr(part, "every", 1) > 1 for part in trainer.callbacks)  # type: ignore[attr-defined]
    if column not in row and "test/loss" in row and not sparse:  # which lacks, too, where no site has tested
        metric = column.partition("/")[0]
        measures = metric in {other.partition("/")[0] for other in row}
        known = (CONFIGS / "metrics" / f"{metric}.yaml").is_file()
        which = f"metrics={metric} measures such columns; " * (known and not measures)
        raise ValueError(f"{key}={column} is no column of this run; {which}there are {', '.join(row)}.")
    return float(row[column]) if column in row else None


@checked
class EarlyStop(AfterRound, EarlyStopping):
    """Lightning's, by any column: ends a run after ``patience`` tests without a better value, or at one like NaN.

    Such a run is finished; its summary says why it ``stopped``. With more patience ``ckpt_path=last`` continues it.

    Args:
        column: any of ``metrics.csv``, of the rounds that are tested.
        mode: ``max`` or ``min``.
        patience: tests, in which the column was measured.
        min_delta: by how much a value must be better to count.

    Raises:
        ValueError: in the first round that is tested: a column that the run does not have.
    """

    def __init__(
        self, column: str = "test/acc", mode: Literal["max", "min"] = "max", patience: Count = 20,
        min_delta: Weight = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(column, mode=mode, patience=patience, min_delta=min_delta)

    @property
    def stopped(self) -> str:
        """Why the run is over; "" if it is not."""
        patient = self.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED and self.wait_count < self.patience
        if patient or self.stopping_reason == EarlyStoppingReason.NOT_STOPPED:
            return ""
        if self.stopping_reason == EarlyStoppingReason.NON_FINITE_METRIC:
            return f"{self.monitor} is not finite"
        tests = "test" if self.wait_count == 1 else f"{self.wait_count} tests"
        return f"{self.monitor} was not better than {self.best_score:.4g} in the last {tests}"

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        if self.stopped:
            more = "with more patience or " * (self.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED)
            way = f"{more}without callbacks.early_stopping it trains on"
            log.info("the run had stopped early: %s; %s", self.stopped, way)
            trainer.should_stop = True

    def after_round(self, trainer: Trainer, row: dict[str, Any]) -> None:
        if not FederatedLoop.of(trainer).tested(row["round"]):
            return  # the last row of a run has a test
        value = measured(trainer, row, "callbacks.early_stopping.column", self.monitor)
        if value is not None:
            trainer.callback_metrics[self.monitor] = torch.tensor(value)
            EarlyStopping.on_validation_end(self, trainer, trainer.lightning_module)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        if self.stopped:
            log.info("stopped early after round %d: %s", trainer.global_step, self.stopped)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})  # the setting may have changed


@checked
class PartitionPicture(AfterRound):
    """Draws ``partition.png``, how the data lie on the clients, after the first round: a run begins no later for it."""

    def __init__(self, folder: str, draw: bool = True) -> None:
        self.folder, self.wanted = Path(folder), draw

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        known = trainer.global_step > 0 and (self.folder / "partition.png").is_file()
        self.wanted = self.wanted and trainer.is_global_zero and not known

    def after_round(self, trainer: Trainer, row: dict[str, Any]) -> None:
        if self.wanted:
            from gcfed.plots.pictures import draw_partition

            self.wanted = False
            if path := draw_partition(self.folder, trainer.datamodule):  # type: ignore[attr-defined]
                show(trainer.loggers, "partition", path, 0)


@checked
class RoundProgressBar(AfterRound):
    """Rounds done, time left, last loss and accuracy: a bar on a terminal, elsewhere a line every few ``seconds``."""

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


class SmoothedAccuracy(ServerPart):
    """The accuracies that tables report, ``test/acc_smooth10`` and ``test/acc_ema`` (FedACG's), in tested rounds.

    The former is the mean of the tests in the last ten rounds, as in GC-Fed's tables.
    The summary of a run reads the accuracies themselves and does not need them.
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
        self.last = dict(state_dict["last"])
        self.ema = state_dict["ema"]
