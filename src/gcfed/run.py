"""One run, from a composed config to its summary: what ``src/train.py`` and
``src/eval.py`` call.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf
from torch import nn

from gcfed.assemble import (
    assemble,
    build_module,
    build_trainer,
    fill_from_data,
    read_data,
    start_at_random,
)
from gcfed.callbacks.after_round import why_stopped
from gcfed.callbacks.pictures import Curves, show_partition
from gcfed.check import check
from gcfed.checkpoints.reading import (
    checkpoint_of,
    load_weights,
    require_fitting,
    resume,
    scaling_in,
    warn_of_other_classes,
    warn_of_other_scaling,
)
from gcfed.checkpoints.record import RunRecord
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.network.blame import blamed
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.network.probing.probe import set_traits
from gcfed.federated.parallel.strategy import trains_on_cpu
from gcfed.folders.failure import failure_recorded, headline
from gcfed.folders.folder import CHECKPOINT, METRICS
from gcfed.folders.identity import hyperparameters
from gcfed.folders.lock import lock_run
from gcfed.folders.place import check_folder, with_folder
from gcfed.folders.printing import print_summary
from gcfed.folders.reading import read_metrics, tested_in
from gcfed.folders.summary import summary_of, write_summary
from gcfed.folders.writing import Holdings, begin, export
from gcfed.utils.home import expand_home
from gcfed.utils.isolation import isolated
from gcfed.utils.machine import cores, keep_freed_memory
from gcfed.utils.refusal import Refusal
from gcfed.utils.stopped import Stopped

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
        """The row of the last round, without empty cells.

        If the run was complete before, the row is that of ``metrics.csv``; {} without such a file.
        """
        if self.loop.run.last_row:
            return {name: float(value) for name, value in self.loop.run.last_row.items()}
        rounds = self.trainer.global_step
        if rounds not in self.frame.index:
            return {}
        return {"round": float(rounds), **self.frame.loc[rounds].dropna()}

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

    Raises before the first round: Refusal for a bad setting or another run's folder, OSError for
    a missing file; TypeError if ``cfg`` is no config. Raises Stopped if SIGINT or SIGTERM ends
    the run.
    """
    if not isinstance(cfg, DictConfig):
        raise TypeError(f"train: {cfg!r} is no config: write train(gcfed.configure(…)).")
    check(cfg)
    cfg = with_folder(cfg)
    if quiet:
        _silence(cfg)
    folder = Path(cfg.paths.output_dir)
    _set_up_process(cfg)
    with lock_run(folder):
        check_folder(cfg, folder)
        run = _Run(cfg, folder)
        # from here on the settings are accepted
        with failure_recorded(folder, write=run.leads):
            run.fit_and_finish()
    metrics = read_metrics(folder / METRICS)
    return RunResult(folder, metrics, run.assembly.module, run.trainer, run.assembly.loop)


def _silence(cfg: DictConfig) -> None:
    OmegaConf.update(cfg, "callbacks.progress", None, force_add=True)
    for package in ("gcfed", "gcfed_sites"):  # isolated() restores their levels
        logging.getLogger(package).setLevel(logging.ERROR)


def _set_up_process(cfg: DictConfig) -> None:
    """Raises Refusal if the config asks for a GPU that is not there."""
    asked = cfg.trainer.accelerator
    if asked in ("gpu", "cuda") and not torch.cuda.is_available():
        raise Refusal(
            f"trainer.accelerator={asked}: torch {torch.__version__} finds no CUDA GPU here: take"
            " trainer=auto or trainer=cpu."
        )
    keep_freed_memory()
    torch.set_num_threads(min(torch.get_num_threads(), cores()))
    torch.set_float32_matmul_precision(cfg.precision_matmul or "highest")


class _Run:
    """A run from its accepted settings to its summary.

    Attributes:
        checkpoint: from which it continues; None if it starts anew.
        rounds_before: the rounds in that checkpoint; 0 if it starts anew.
        leads: whether this process is the first one, which writes the run's folder.

    Raises Refusal if a setting cannot work, or the checkpoint is not this run's.
    """

    def __init__(self, cfg: DictConfig, folder: Path) -> None:
        self.cfg = cfg
        self.folder = folder
        self.checkpoint = checkpoint_of(cfg, folder)
        self.assembly = assemble(cfg)
        self._warn_of_start()
        self.record = RunRecord(cfg, self.assembly.data)
        self.rounds_before = resume(
            cfg,
            self.checkpoint,
            self.record,
            self.assembly.module,
            self.assembly.loop,
            self.assembly.callbacks,
        )
        callbacks = [*self.assembly.callbacks, self.record]
        if cfg.extras.figures:
            callbacks.append(Curves(folder))
        self.trainer = build_trainer(cfg, self.assembly, callbacks, self.rounds_before)
        self.leads = self.trainer.is_global_zero

    def _warn_of_start(self) -> None:
        """Warns if the run that wrote ``model.start`` scaled its inputs by other numbers."""
        start = self.cfg.model.get("start")
        if start is not None and self.checkpoint is None:
            ours = self.assembly.data.scaling_of_inputs
            warn_of_other_scaling(f"model.start={start}", scaling_in(Path(start)), ours)

    def fit_and_finish(self) -> None:
        """Trains the rounds that are left. The first process writes the run's folder."""
        holdings = self._begin_folder() if self.leads else None
        for logger in self.trainer.loggers:
            logger.log_hyperparams(hyperparameters(self.cfg))
        if holdings is not None and self.cfg.extras.figures:
            show_partition(
                self.assembly.data, holdings, self.folder, self.trainer.loggers, self.rounds_before
            )
        self._fit()
        if holdings is not None:
            data = self.assembly.data
            export(self.folder, self.assembly.module.net, self.trainer.global_step, data)
            self._summarize(holdings)

    def _begin_folder(self) -> Holdings:
        known = not self.assembly.loop.run.setup.transport.own_data
        resumed = self.checkpoint is not None
        holdings = begin(self.cfg, self.folder, self.assembly.data, known=known, resumed=resumed)
        device = self.trainer.strategy.root_device
        log.info("%s; on %d × %s", self.assembly, self.trainer.world_size, device)
        return holdings

    def _fit(self) -> None:
        with self._explained_errors(), _no_later_writing(self.trainer):
            self.trainer.fit(
                self.assembly.module,
                datamodule=self.assembly.data,
                ckpt_path=self.checkpoint,
                weights_only=True,
            )

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Turns a signal into Stopped, and an error of a damaged checkpoint into a Refusal."""
        try:
            yield
        except BaseException as error:
            signum = signal_of(error)
            if signum is not None:
                raise Stopped(signum, where_stopped(self.trainer, self.folder)) from error
            if self.checkpoint is not None and self.trainer.global_step <= self.rounds_before:
                refuse_checkpoint(self.checkpoint, error)
            raise

    def _summarize(self, holdings: Holdings) -> None:
        """Writes and prints the summary.

        A run that was killed between its last checkpoint and this method calls it when it is
        resumed.
        """
        rounds = self.trainer.global_step
        metrics = read_metrics(self.folder / METRICS)
        if not tested_in(metrics, rounds):
            return
        summary = summary_of(metrics, self.cfg.targets, self.record.processes, self.assembly.result)
        summary |= holdings.skew
        about = self.record.about | {"version": self.record.version(rounds)}
        stopped = why_stopped(self.assembly.callbacks)
        if stopped:
            about["stopped"] = stopped[:100]
        write_summary(self.folder, summary, about)
        if log.isEnabledFor(logging.WARNING):
            print_summary(summary, metrics, self.folder, stopped)


@contextmanager
def _no_later_writing(trainer: Trainer) -> Iterator[None]:
    """Waits for the checkpoints at the end, even if Lightning fails: nothing may be written after
    the folder is unlocked.
    """
    try:
        yield
    finally:
        trainer.strategy.checkpoint_io.teardown()


def refuse_checkpoint(path: Path, error: BaseException) -> None:
    """Raises Refusal for an error in the first round after a checkpoint, unless it explains
    itself.
    """
    if isinstance(error, Exception) and not isinstance(error, Refusal | OSError):
        raise Refusal(
            f"ckpt_path={path}: the run cannot go on from there: {headline(error)}. If it runs"
            " without ckpt_path, the file is damaged: start anew."
        ) from error


def signal_of(error: BaseException) -> int | None:
    """The number of the signal that ended a fit with this error; None for an error of its own."""
    if isinstance(error, Stopped):
        return error.signum
    if isinstance(error, SIGTERMException):
        return signal.SIGTERM
    # Lightning turns a Ctrl-C into an exit.
    cause = error.__context__ if isinstance(error, SystemExit) else error
    return signal.SIGINT if isinstance(cause, KeyboardInterrupt) else None


def where_stopped(trainer: Trainer, folder: Path) -> str:
    """The end of a sentence: in which round a run was stopped, and how to continue it."""
    done = trainer.global_step
    rounds = trainer.max_steps
    if done >= rounds:
        place = f" after the last of {rounds} rounds"
    else:
        place = f" in round {done + 1} of {rounds}"
    if (folder / CHECKPOINT).is_file():
        return f"{place}: repeat the command with ckpt_path=last to continue"
    return f"{place}, before its first checkpoint: ckpt_path=last cannot continue it, so start anew"


@isolated()
def evaluate(cfg: DictConfig) -> dict[str, float]:
    """Tests a global model on the test split.

    Args:
        cfg: the settings of its run. ``ckpt_path`` is a checkpoint or safetensors. Of its content
            only the tensors, the number of rounds and the scaling of the data are used.

    Raises Refusal if there is no file, or it is damaged, or it holds another model than ``cfg``
    describes.
    """
    cfg = deepcopy(cfg)
    expand_home(cfg)
    if cfg.ckpt_path is None:
        raise Refusal(f"name the model to test: ckpt_path=<run>/{CHECKPOINT}.")
    weights = load_weights(str(cfg.ckpt_path))
    torch.set_float32_matmul_precision(cfg.precision_matmul or "highest")
    data = read_data(cfg)
    cfg = fill_from_data(cfg, data)
    start_at_random(cfg)  # the file's tensors replace the model's
    module = build_module(cfg, data)
    with blamed(module.net, module.task, "before the test"):
        set_traits(module, data, stack=1)
    path = Path(cfg.ckpt_path)
    module.net.load_state_dict(require_fitting(module, weights.tensors, path))
    warn_of_other_scaling(f"ckpt_path={path}", weights.scaling, data.scaling_of_inputs)
    warn_of_other_classes(path, weights.classes, data.class_names)
    on_gpu = torch.cuda.is_available() and not trains_on_cpu(cfg.trainer.accelerator)
    trainer = Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        precision=cfg.precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with blamed(module.net, module.task, "in the test"):
        trainer.validate(module, datamodule=data, verbose=False)
    figures: dict[str, float] = {"round": weights.rounds}
    for name, value in trainer.callback_metrics.items():
        figures[name] = float(value)
    return figures
