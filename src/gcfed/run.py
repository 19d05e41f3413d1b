"""One run, from a composed config to its summary: what ``src/train.py`` and ``src/eval.py`` call."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save
from torch import nn

from gcfed.assemble import Parts, assemble, build_module, build_trainer, describe, described
from gcfed.callbacks.after_round import why_stopped
from gcfed.check import check
from gcfed.checkpoints.reading import RunRecord, check_checkpoint, fitting, load_weights, resume_from
from gcfed.federated.loop import FederatedLoop
from gcfed.federated.module import FederatedModule
from gcfed.federated.parallel.strategy import trains_on_cpu
from gcfed.federated.training.probe import look
from gcfed.runs.folder import CHECKPOINT, CONFIG, EXPORT, METRICS, check_folder, with_folder
from gcfed.runs.identity import hyperparameters
from gcfed.runs.reading import column, counts_of, label_skew, read_metrics
from gcfed.runs.summary import failure_recorded, print_summary, summary_of, write_summary
from gcfed.utils.files import locked, replacing
from gcfed.utils.instantiate import require
from gcfed.utils.isolation import isolated
from gcfed.utils.machine import cores, keep_freed_memory, leads

if TYPE_CHECKING:
    import pandas as pd  # a run imports it at its end only

log = logging.getLogger(__name__)


@dataclass(repr=False)
class RunResult:
    """What a finished run leaves in memory; everything else is in ``folder``."""

    folder: Path
    frame: pd.DataFrame  # ``metrics.csv``: one row per round, which is the index; NaN where a round was not tested
    module: FederatedModule
    trainer: Trainer
    loop: FederatedLoop

    @property
    def metrics(self) -> dict[str, float]:
        """The row of the last round, without empty cells."""
        last: Any = self.trainer.callback_metrics or self.frame.reset_index().tail(1).dropna(axis=1).squeeze(axis=0)
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

    Raises before the first round: ValueError if a setting cannot work or the folder holds another run, OSError if data
    or a checkpoint do not exist.
    """
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
        found = resume_from(cfg.ckpt_path, folder)
        parts = assemble(cfg)
        record, checkpoint, resume_round = RunRecord(cfg, parts.data), None, 0
        if found is not None:
            checkpoint, resume_round = found[0], check_checkpoint(cfg, *found, record, parts.module)
            if leads() and not parts.loop.transport.remote:
                parts.loop.stores.check(found[1]["callbacks"][parts.loop.state_key]["stores"])
            del found  # a file that is soon replaced takes room until it is closed
        trainer = build_trainer(cfg, parts, [*parts.callbacks, record], resume_round)
        with failure_recorded(folder, write=trainer.is_global_zero):  # from here on the settings are accepted
            if trainer.is_global_zero:
                held = begin(cfg, parts, folder, trainer, resumed=checkpoint is not None)
            for logger in trainer.loggers:
                logger.log_hyperparams(hyperparameters(cfg))
            try:
                trainer.fit(parts.module, datamodule=parts.data, ckpt_path=checkpoint, weights_only=True)
            finally:  # nothing is being written once the folder is unlocked, even if Lightning's own end fails
                trainer.strategy.checkpoint_io.teardown()
            if trainer.is_global_zero:
                finish(cfg, parts, folder, trainer, record.about, held)
    return RunResult(folder, read_metrics(folder / METRICS), parts.module, trainer, parts.loop)


@contextmanager
def taken(folder: Path) -> Iterator[None]:
    """Locks a run's folder while its first process works there. A run that is refused leaves no folder."""
    if not leads():
        yield
        return
    try:
        with locked(folder / ".lock") as holder:
            if holder:
                raise ValueError(f"{folder} is in use by {holder}: wait until it has ended, or name another folder.")
            for place in (folder, (folder / CHECKPOINT).parent):
                for left in place.glob(".*.[0-9]*.*"):  # by a killed process (utils/files.py)
                    left.unlink()
            yield
    finally:
        with suppress(OSError):
            folder.rmdir()  # succeeds if it is empty


@isolated()
def evaluate(cfg: DictConfig) -> dict[str, float]:
    """Tests a global model on the test split.

    Args:
        cfg: the settings of the run that made it, as for :func:`train`. ``ckpt_path`` names a checkpoint or a
            ``global_model.safetensors``; only its tensors are read.

    Raises ValueError if the file is damaged, or holds another model than ``cfg`` describes.
    """
    tensors, rounds = load_weights(cfg.ckpt_path)
    torch.set_float32_matmul_precision(cfg.precision_matmul or "highest")
    data = require(cfg, "data")
    data.setup()
    cfg = described(cfg, data)
    for key in {"weights", "pretrained", "start"} & cfg.model.keys():
        cfg.model[key] = False if key == "pretrained" else None  # the file's tensors replace them: no download
    module = build_module(cfg)
    look(module, data)
    module.net.load_state_dict(fitting(module, tensors, Path(cfg.ckpt_path)))
    device = "gpu" if torch.cuda.is_available() and not trains_on_cpu(cfg.trainer.accelerator) else "cpu"
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator=device, devices=1, precision=cfg.precision, **quiet)
    trainer.validate(module, datamodule=data, verbose=False)
    return {"round": rounds} | {key: float(trainer.callback_metrics[key]) for key in module.tested()}


def begin(cfg: DictConfig, parts: Parts, folder: Path, trainer: Trainer, *, resumed: bool) -> pd.DataFrame | None:
    """Writes the config, below the command that started the run, and which client holds which sample.

    Returns how many samples of each class clients hold, before attacks change labels; None if the server does not know.
    """
    data, known = parts.data, not parts.loop.transport.own_data
    by_hydra = HydraConfig.initialized()
    origin = f"python src/train.py {shlex.join(HydraConfig.get().overrides.task)}" if by_hydra else "made from Python"
    with replacing(folder / CONFIG) as temporary:
        temporary.write_text(f"# {origin}\n{OmegaConf.to_yaml(cfg, resolve=True)}")
    if known:
        data.partition.save(folder / "partition.npz")
    if data.scaling:
        with replacing(folder / "scaling.npz") as temporary:
            np.savez(temporary, **data.scaling)  # type: ignore[arg-type]
    if not resumed:
        (folder / METRICS).unlink(missing_ok=True)  # rounds before the first checkpoint are trained again
    log.info(describe(parts, trainer))
    return counts_of(data) if known else None


def finish(
    cfg: DictConfig, parts: Parts, folder: Path, trainer: Trainer, about: dict[str, str], held: pd.DataFrame | None
) -> None:
    """Writes what a finished run leaves: the global model, the summary and pictures. Prints the summary.

    A run that was killed between its last checkpoint and this function calls it when it is resumed.
    """
    tensors = parts.module.net.state_dict()  # copied, since safetensors refuses a weight that two modules share
    state = {n: t.to("cpu", copy=True, memory_format=torch.contiguous_format) for n, t in tensors.items()}
    with replacing(folder / EXPORT) as temporary:
        temporary.write_bytes(save(state, metadata={"round": str(trainer.global_step)}))
    stopped = why_stopped(parts.callbacks)
    metrics = read_metrics(folder / METRICS)
    if trainer.global_step not in column(metrics, "test/loss").index:
        return  # no logger has written rows, or the last round has no test
    summary = summary_of(metrics, cfg.targets, trainer.world_size) | ({} if held is None else label_skew(held))
    write_summary(folder, summary, about | ({"stopped": stopped[:100]} if stopped else {}))
    if cfg.extras.figures:
        from gcfed.plots.pictures import draw_partition, plot_curves  # matplotlib

        plot_curves(metrics, folder / "curves.png")
        if held is not None and not (folder / "partition.png").is_file():
            draw_partition(parts.data, held, folder / "partition.png")
    if log.isEnabledFor(logging.WARNING):  # not quiet
        print_summary(summary, metrics, folder, stopped)
