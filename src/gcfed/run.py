"""One run, from a composed config to its summary: what ``src/train.py`` and ``src/eval.py`` call."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from gcfed.federated.loop import FederatedLoop
from gcfed.methods.base import FederatedMethod
from gcfed.models.module import FederatedModule
from gcfed.utils.cpu import keep_freed_memory
from gcfed.utils.instantiate import build, build_all
from gcfed.utils.rng import torch_seed

log = logging.getLogger(__name__)
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # tips and device lists; errors still come through
warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # lightning 2.6 under torch 2.15
warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")  # a batch is a round: nothing to resume

# What makes a run the run that it is: a checkpoint continues under the same values only.
IDENTITY = (
    "seed", "precision", "data", "partition", "participation", "model", "client", "server", "aggregator", "methods",
    "gc",
)  # fmt: skip


@dataclass
class RunResult:
    """What a finished run leaves in memory; everything else lies in ``folder``."""

    folder: Path
    metrics: dict[str, float]
    module: FederatedModule
    trainer: Trainer
    loop: FederatedLoop | None = field(default=None)


def train(cfg: DictConfig) -> RunResult:
    """Trains as configured, resumes where ``ckpt_path`` says so, and writes the run's folder.

    Raises:
        ValueError: a setting that cannot work; names the key and the remedy, before the first round.
        FileNotFoundError: data or a checkpoint that is not there.
    """
    check(cfg)
    keep_freed_memory()
    folder = Path(cfg.paths.output_dir)
    checkpoint = resume_from(cfg.ckpt_path, folder)
    seed_everything(torch_seed(cfg.seed, "initialisation") % 2**32, verbose=False)
    module = build_module(cfg)
    resume_round = 0
    if checkpoint is not None:
        resume_round = check_checkpoint(checkpoint, cfg, module)
        log.info("resuming %s after round %d", folder, resume_round)

    data = build(cfg.data)
    data.setup()
    methods = [m for m in (*build_all(cfg.methods), build(cfg.gc)) if m is not None]  # GC last: P·(corrected gradient)
    loop = FederatedLoop(
        sampler=build(cfg.participation.sampler),
        solver=build(cfg.client),
        aggregator=build(cfg.aggregator),
        rounds=cfg.rounds,
        seed=cfg.seed,
        eval_every=cfg.eval_every,
    )
    callbacks: list[Callback] = [loop, *methods, _Record(cfg), *build_all(cfg.callbacks)]
    loggers: list[Logger] = build_all(cfg.logger, resume_round=resume_round)
    trainer: Trainer = build(cfg.trainer, callbacks=callbacks, logger=loggers)

    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
        data.partition.save(folder / "partition.npz")
    for logger in loggers:
        logger.log_hyperparams(_plain(cfg, IDENTITY))
    log.info(describe(module, data, loop, methods))
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)

    if trainer.is_global_zero:
        from gcfed.report.summary import write_summary  # matplotlib: only once the run is done

        write_summary(folder, data, targets=cfg.targets, figures=cfg.extras.figures)
    metrics = {k: float(v) for k, v in {**trainer.callback_metrics, **loop.last_row}.items()}
    return RunResult(folder, metrics, module, trainer, loop)


def evaluate(cfg: DictConfig) -> dict[str, float]:
    """Tests the global model of a checkpoint on the test split of the run that wrote it."""
    path = existing(cfg.ckpt_path, "ckpt_path")
    checkpoint = load_checkpoint(path)
    run = OmegaConf.create(checkpoint["gcfed"]["config"])
    run = OmegaConf.merge(run, {"paths": cfg.paths}, cfg.override or {})
    assert isinstance(run, DictConfig)
    module = build_module(run)
    load_weights(module, checkpoint, path)
    data = build(run.data)
    trainer: Trainer = build(cfg.trainer)
    trainer.validate(module, datamodule=data, verbose=False)
    metrics = {key: float(trainer.callback_metrics[key]) for key in ("test/acc", "test/loss")}
    return {"round": checkpoint["global_step"], **metrics}


def check(cfg: DictConfig) -> None:
    """Refuses what cannot work before anything is built."""
    if str(cfg.precision).startswith("16"):
        raise ValueError(
            f"precision={cfg.precision} scales the loss, so gradient hooks (GC, SCAFFOLD, clipping) would see scaled "
            "gradients. Use precision=bf16-mixed or 32-true."
        )
    for key in ("rounds", "eval_every"):
        if not isinstance(cfg[key], int) or cfg[key] < 1:
            raise ValueError(f"{key}={cfg[key]} must be a whole number of at least 1.")


def build_module(cfg: DictConfig) -> FederatedModule:
    """The global network under its server optimizer."""
    return FederatedModule(
        build(cfg.model), build(cfg.server), num_classes=cfg.data.num_classes, channels_last=cfg.channels_last
    )


def describe(module: FederatedModule, data: Any, loop: FederatedLoop, methods: list[FederatedMethod]) -> str:
    parameters = sum(p.numel() for p in module.net.parameters())
    names = ", ".join(type(m).__name__ for m in methods) or "none"
    sizes = data.partition.sizes
    return (
        f"{type(module.net).__name__} with {parameters:,} parameters; {data.num_clients:,} clients with "
        f"{sizes.min()} to {sizes.max()} samples; {loop.sampler}; methods: {names}"
    )


# ------------------------------------------------------------------------------------------------------ checkpoints
class _Record(Callback):
    """Writes what the run is into its checkpoints, as plain Python."""

    def __init__(self, cfg: DictConfig) -> None:
        self.content = {
            "identity": _plain(cfg, IDENTITY),
            "config": OmegaConf.to_container(cfg, resolve=True),
        }

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["gcfed"] = self.content


def existing(path: str | Path, key: str) -> Path:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{key}={path}: there is no such file. Checkpoints lie in <run>/checkpoints/last.ckpt.")
    return path


def resume_from(ckpt_path: str | None, folder: Path) -> Path | None:
    """The checkpoint to continue from; ``last`` is that of the run's own folder, which the config chose."""
    if ckpt_path is None:
        return None
    if ckpt_path != "last":
        return existing(ckpt_path, "ckpt_path")
    last = folder / "checkpoints" / "last.ckpt"
    if last.is_file():
        return last
    if "multirun" in str(folder):
        return None  # a sweep continues: this job had not begun
    raise FileNotFoundError(
        f"ckpt_path=last: no earlier run with these overrides has a checkpoint (this one would write to {folder}). "
        "Repeat the overrides of the run to continue, or give ckpt_path=<run>/checkpoints/last.ckpt."
    )


def load_checkpoint(path: Path) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(f"{path} is no readable checkpoint of this project: {error}") from error
    if "gcfed" not in checkpoint:
        raise ValueError(f"{path} was not written by this project: it holds no description of its run.")
    return checkpoint


def check_checkpoint(path: Path, cfg: DictConfig, module: FederatedModule) -> int:
    """Refuses a checkpoint of another model or another run; returns its number of finished rounds."""
    checkpoint = load_checkpoint(path)
    load_weights(module, checkpoint, path, dry=True)
    then, now = _flat(checkpoint["gcfed"]["identity"]), _flat(_plain(cfg, IDENTITY))
    differ = sorted(k for k in then.keys() | now.keys() if then.get(k) != now.get(k))
    if differ:
        listed = "; ".join(f"{k} was {then.get(k)!r}, now {now.get(k)!r}" for k in differ[:8])
        raise ValueError(
            f"ckpt_path={path} belongs to another run: {listed}. Repeat that run's overrides, or start anew without "
            "ckpt_path."
        )
    return int(checkpoint["global_step"])


def load_weights(module: FederatedModule, checkpoint: Mapping[str, Any], path: Path, *, dry: bool = False) -> None:
    """Loads the global network; ``dry`` only compares.

    Raises:
        ValueError: names or shapes differ: the checkpoint is of another model.
    """
    theirs = {k[4:]: v for k, v in checkpoint["state_dict"].items() if k.startswith("net.")}
    ours = module.net.state_dict()
    odd = sorted(k for k in theirs.keys() ^ ours.keys()) or [k for k in ours if theirs[k].shape != ours[k].shape]
    if odd:
        detail = ", ".join(
            f"{k} ({tuple(theirs[k].shape) if k in theirs else 'absent'} there, "
            f"{tuple(ours[k].shape) if k in ours else 'absent'} here)"
            for k in odd[:4]
        )
        raise ValueError(
            f"ckpt_path={path} holds another model than {type(module.net).__name__}: {detail}. "
            "Set model=… and data=… as in the run that wrote it."
        )
    if not dry:
        module.net.load_state_dict(theirs)


def _plain(cfg: DictConfig, keys: tuple[str, ...]) -> dict[str, Any]:
    container = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(container, dict)
    return {key: container[key] for key in keys}


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict) and tree:
        return {k: v for key, sub in tree.items() for k, v in _flat(sub, f"{prefix}{key}.").items()}
    return {prefix[:-1]: tree}


def hyperparameters(cfg: DictConfig) -> dict[str, Any]:
    return _flat(_plain(cfg, IDENTITY))
