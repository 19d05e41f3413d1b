"""One bar over all rounds."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from gcfed.federated.loop import FederatedLoop


class RoundProgressBar(TQDMProgressBar):
    """Rounds done, time left, and the last loss and accuracy; no bar for the tests in between."""

    BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.set_description("Round", refresh=False)
        bar.unit = "round"
        return bar

    def init_validation_tqdm(self) -> Tqdm:
        return Tqdm(disable=True)

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        super().on_train_start(trainer, *_)
        self.train_progress_bar.initial = trainer.global_step  # so that the time left is right after a resume

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self.train_progress_bar.reset(int(trainer.max_steps))
        self.train_progress_bar.initial = trainer.global_step
        self.train_progress_bar.n = trainer.global_step
        self.train_progress_bar.set_description("Round")

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        row = FederatedLoop.of(trainer).last_row
        return {name.split("/")[1]: f"{row[name]:.3f}" for name in ("train/loss", "test/acc") if name in row}
