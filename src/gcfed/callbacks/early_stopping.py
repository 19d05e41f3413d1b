"""A run ends before its last round where a column gets no better: Lightning's early stopping, by any column."""

import logging
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason

from gcfed.callbacks.after_round import AfterRound, measured
from gcfed.federated.loop import FederatedLoop
from gcfed.utils.checked import Count, Weight, checked

log = logging.getLogger(__name__)


@checked
class EarlyStop(AfterRound, EarlyStopping):
    """Ends the run after ``patience`` tests without a better value, or where the value is not finite.

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
        self,
        column: str = "test/acc",
        mode: Literal["max", "min"] = "max",
        patience: Count = 20,
        min_delta: Weight = 0.0,
    ) -> None:
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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stopped:
            log.info("the run had stopped early: more callbacks.early_stopping.patience, or none of it, trains on")
            trainer.should_stop = True

    def after_round(self, trainer: Trainer, row: dict[str, Any]) -> None:
        if not FederatedLoop.of(trainer).tested(row["round"]):
            return  # the last row of a run has a test
        value = measured(trainer, row, "callbacks.early_stopping.column", self.monitor)
        if value is not None:
            trainer.callback_metrics[self.monitor] = torch.tensor(value)
            EarlyStopping.on_validation_end(self, trainer, trainer.lightning_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stopped:
            log.info("stopped early after round %d: %s", trainer.global_step, self.stopped)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})  # the setting may have changed
