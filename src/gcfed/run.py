"""One run, from a composed config to its summary: what ``src/train.py`` and
``src/eval.py`` call.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf
from torch import nn

from gcfed.assemble import assemble, build_module, build_trainer, described
from gcfed.callbacks.after_round import why_stopped
from gcfed.check import check
from gcfed.checkpoints.reading import RunRecord, checkpoint_of, fitting, load_weights, resume
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.network.blame import blamed
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.network.probe import set_traits
from gcfed.federated.parallel.strategy import trains_on_cpu
from gcfed.runs.folder import METRICS, check_folder, with_folder
from gcfed.runs.identity import hyperparameters
from gcfed.runs.lock import taken
from gcfed.runs.reading import read_metrics
from gcfed.runs.summary import failure_recorded
from gcfed.runs.writing import begin, finish
from gcfed.utils.instantiate import require
from gcfed.utils.isolation import isolated
from gcfed.utils.machine import cores, keep_freed_memory

if TYPE_CHECKING:
    import pandas as pd  # a run imports it at its end only

log = logging.getLogger(__name__)


@dataclass(repr=False)
class RunResult:
    """What a finished run leaves in memory; everything else is in ``folder``."""

    folder: Path
    # ``metrics.csv``: one row per round, which is the index; NaN where a round was not tested
    frame: pd.DataFrame
    module: FederatedModule
    trainer: Trainer
    loop: FederatedLoop

    @property
    def metrics(self) -> dict[str, float]:
        """The row of the last round, without empty cells."""
        last: Any = self.trainer.callback_metrics or self.frame.reset_index().tail(1).dropna(
            axis=1
        ).squeeze(axis=0)
        return {name: float(value) for name, value in last.items()}

    @property
    def model(self) -> nn.Module:
        """The global network after the last round."""
        return self.module.net

    def __repr__(self) -> str:
        shown = ("round", "test/acc", "test/rmse", "test/loss")
        figures = [f"{name}={self.metrics[name]:.4g}" for name in shown if name in self.metrics]
        return f"RunResult({', '.join(figures)}, folder={str(self.folder)!r})"


@isolated()
def train(cfg: DictConfig, *, quiet: bool = False) -> RunResult:
    """Trains as configured, resumes if ``ckpt_path`` is set, and writes the run's folder.

    ``quiet``: shows no progress bar, no summary, and only those log lines that are errors.

    Raises before the first round: ValueError for a bad setting or another run's folder, OSError for
    a missing file; TypeError if ``cfg`` is no config.
    """
    if not isinstance(cfg, DictConfig):
        raise TypeError(f"train: {cfg!r} is no config: write train(gcfed.configure(…)).")
    check(cfg)
    cfg = with_folder(cfg)
    if quiet:
        OmegaConf.update(cfg, "callbacks.progress", None, force_add=True)
        for package in ("gcfed", "gcfed_sites"):  # isolated() restores their levels
            logging.getLogger(package).setLevel(logging.ERROR)
    folder = Path(cfg.paths.output_dir)
    keep_freed_memory()
    torch.set_num_threads(min(torch.get_num_threads(), cores()))
    torch.set_float32_matmul_precision(cfg.precision_matmul or "highest")
    with taken(folder):
        check_folder(cfg, folder)
        checkpoint = checkpoint_of(cfg, folder)
        parts = assemble(cfg)
        record = RunRecord(cfg, parts.data)
        done = resume(cfg, checkpoint, record, parts.module, parts.loop)
        trainer = build_trainer(cfg, parts, [*parts.callbacks, record], done)
        leads = trainer.is_global_zero
        with failure_recorded(folder, write=leads):  # from here on the settings are accepted
            if leads:
                known = not parts.loop.transport.own_data
                held = begin(cfg, folder, parts.data, known=known, resumed=checkpoint is not None)
                log.info("%s; on %d × %s", parts, trainer.world_size, trainer.strategy.root_device)
            for logger in trainer.loggers:
                logger.log_hyperparams(hyperparameters(cfg))
            try:
                trainer.fit(
                    parts.module, datamodule=parts.data, ckpt_path=checkpoint, weights_only=True
                )
            finally:
                # Nothing may be written after the folder is unlocked, even if Lightning fails.
                trainer.strategy.checkpoint_io.teardown()
            if leads:
                stopped = why_stopped(parts.callbacks)
                about = record.about
                net = parts.module.net
                result = parts.result
                finish(cfg, folder, net, trainer, parts.data, held, about, stopped, result)
    return RunResult(folder, read_metrics(folder / METRICS), parts.module, trainer, parts.loop)


@isolated()
def evaluate(cfg: DictConfig) -> dict[str, float]:
    """Tests a global model on the test split.

    Args:
        cfg: the settings of its run. Only the tensors of ``ckpt_path``, a checkpoint or
            safetensors, are read.

    Raises ValueError if the file is damaged, or holds another model than ``cfg`` describes.
    """
    tensors, rounds = load_weights(cfg.ckpt_path)
    torch.set_float32_matmul_precision(cfg.precision_matmul or "highest")
    data = require(cfg, "data")
    data.setup()
    cfg = described(cfg, data)
    for key in {"weights", "pretrained", "start"} & cfg.model.keys():
        # the file's tensors replace them: no download
        cfg.model[key] = False if key == "pretrained" else None
    module = build_module(cfg, data)
    with blamed(module.net, module.task, "before the test"):
        set_traits(module, data, stack=1)
    module.net.load_state_dict(fitting(module, tensors, Path(cfg.ckpt_path)))
    device = (
        "gpu" if torch.cuda.is_available() and not trains_on_cpu(cfg.trainer.accelerator) else "cpu"
    )
    quiet: Any = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(accelerator=device, devices=1, precision=cfg.precision, **quiet)
    with blamed(module.net, module.task, "in the test"):
        trainer.validate(module, datamodule=data, verbose=False)
    return {"round": rounds} | {
        key: float(value) for key, value in trainer.callback_metrics.items()
    }
