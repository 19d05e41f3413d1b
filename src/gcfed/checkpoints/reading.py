"""Reads checkpoints, and refuses those of another run, model or data set."""

import json
import logging
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from lightning.pytorch import Callback
from numpy import ndarray
from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

from gcfed.checkpoints.record import RunRecord
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.network.module import FederatedModule
from gcfed.folders.folder import CHECKPOINT, CONFIG, EXPORT
from gcfed.folders.identity import differences, leaves
from gcfed.folders.place import newest_first
from gcfed.folders.reading import read_yaml
from gcfed.utils.machine import in_sweep, leads
from gcfed.utils.refusal import MissingFile, Refusal, message_of

log = logging.getLogger(__name__)
Scaling = Mapping[str, ndarray]  # the means and deviations of inputs and targets, by name
Content = Mapping[str, Any]  # of a checkpoint, or a part of it
PARTS = {"state_dict", "global_step", "gcfed", "loops", "optimizer_states", "callbacks"}


def checkpoint_of(cfg: DictConfig, folder: Path) -> Path | None:
    """The checkpoint to continue from; None to start anew.

    ``ckpt_path=last`` is ``last.ckpt`` in the run's folder.
    """
    if cfg.ckpt_path is None:
        return None
    path = folder / CHECKPOINT if cfg.ckpt_path == "last" else Path(cfg.ckpt_path)
    if cfg.ckpt_path == "last" and not path.is_file():
        if not in_sweep():
            raise MissingFile(
                "ckpt_path=last: no earlier run with these settings has a checkpoint (its folder"
                f" would be {folder}).{_newest_beside(folder, cfg)} Repeat the overrides of the run"
                f" to continue, or set ckpt_path=<run>/{CHECKPOINT}."
            )
        log.warning(
            "ckpt_path=last: this job of the sweep has no checkpoint yet. It starts in %s", folder
        )
        return None
    _require_file(path)
    return path


def _newest_beside(folder: Path, cfg: DictConfig) -> str:
    """A sentence about the newest run beside this folder that has a checkpoint, and what differs;
    "" without such a run.
    """
    folders = newest_first(folder.parent)
    if not folders:
        return ""
    newest = folders[0]
    try:
        differing = differences(leaves(read_yaml(newest / CONFIG)), leaves(cfg))
    except (Refusal, OSError, yaml.YAMLError):  # a damaged file
        return ""
    return f" The newest one there, {newest.name}, has other settings: {differing}."


def _require_file(path: str | Path) -> None:
    if not Path(path).is_file():
        raise MissingFile(
            f"ckpt_path={path}: there is no such file. Set ckpt_path=<run>/{CHECKPOINT}."
        )


def resume(
    cfg: DictConfig,
    path: Path | None,
    record: RunRecord,
    module: FederatedModule,
    loop: FederatedLoop,
    callbacks: Sequence[Callback],
) -> int:
    """The number of rounds in the checkpoint from which this run continues; 0 if it starts anew.

    All that Lightning will restore is tried here first.

    Raises Refusal if it belongs to another model, run or data set, has more rounds than this run,
    or is damaged.
    """
    if path is None:
        return 0
    checkpoint = load_checkpoint(path)
    with naming(path):
        require_fitting(module, net_of(checkpoint), path)
        _check_origin(path, checkpoint["gcfed"], record.content)
        rounds = _rounds_of(checkpoint)
        record.restore(checkpoint["gcfed"], rounds)
        if rounds > cfg.rounds:
            raise Refusal(f"rounds={cfg.rounds}: {path} has {rounds} already. Set as many or more.")
        if leads() and not loop.run.setup.transport.remote:
            loop.run.setup.stores.load_state_dict(checkpoint["callbacks"][loop.state_key]["stores"])
            loop.run.setup.stores.require_files()
        _try_states(checkpoint, module, callbacks)
    if rounds == cfg.rounds:
        log.info("all %d rounds of %s are done", rounds, cfg.paths.output_dir)
    else:
        log.info("resuming %s after round %d of %d", cfg.paths.output_dir, rounds, cfg.rounds)
    return rounds


@contextmanager
def naming(path: Path | str, key: str = "ckpt_path") -> Iterator[None]:
    """Errors of the block become a Refusal that names the file, and the key that named it."""
    try:
        yield
    except (Refusal, OSError):
        raise
    except Exception as error:
        raise Refusal(
            f"{key}={path} is damaged, or no checkpoint of this project: {_brief(error)}"
        ) from error


def _brief(error: Exception) -> str:
    """An error in some words. torch explains at length why it does not load a pickle."""
    if isinstance(error, UnpicklingError):
        return "it holds more than tensors and plain values, and nothing of it was executed"
    message = message_of(error)[:200]
    if isinstance(error, ValueError):
        return message
    return f"{type(error).__name__}: {message}"


def _check_origin(path: Path, there: Content, here: Content) -> None:
    """Raises Refusal if the record in a checkpoint is that of another run, or of other data."""
    if there["identity"] != here["identity"]:
        raise Refusal(
            f"ckpt_path={path} belongs to another run:"
            f" {differences(there['leaves'], here['leaves'])}. Repeat that run's overrides, or"
            " start anew without ckpt_path."
        )
    before = there["checksums"]
    changed = [name for name, sum_ in here["checksums"].items() if before.get(name) != sum_]
    if changed:
        raise Refusal(
            f"ckpt_path={path}: the data have changed since: {', '.join(changed)}. "
            "Put the old files back, or start anew without ckpt_path."
        )


def _rounds_of(checkpoint: Content) -> int:
    """The number of finished rounds, by which all parts of a checkpoint must go."""
    rounds = checkpoint["global_step"]
    progress = checkpoint["loops"]["fit_loop"]
    counted = progress["epoch_loop.manual_optimization.optim_step_progress"]["total"]["completed"]
    if type(rounds) is not int or rounds < 1 or rounds != counted:
        raise ValueError(f"it counts {rounds} rounds in one place and {counted} in another")
    # of any other type, Lightning would fail when it has trained the next round
    for name, count in tree_leaves_with_path(progress):
        if type(count) not in (int, bool):
            raise ValueError(f"its counter {keystr(name)} is {count!r}")
    return rounds


def _try_states(
    checkpoint: Content, module: FederatedModule, callbacks: Sequence[Callback]
) -> None:
    """Loads the states of the server's optimizer and of all parts, as Lightning will again."""
    (state,) = checkpoint["optimizer_states"]
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(deepcopy(state))
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            is_scalar = not isinstance(value, Tensor) or value.numel() == 1
            if not is_scalar and value.shape != parameter.shape:
                raise ValueError(f"the server optimizer's {name} has the shape {[*value.shape]}")
    states = checkpoint["callbacks"]
    for callback in callbacks:
        if callback.state_key in states:
            callback.load_state_dict(deepcopy(states[callback.state_key]))
        elif callback.state_dict():
            raise ValueError(f"the state of {callback.state_key} is missing")


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint of this project. Nothing in it is called.

    Raises MissingFile if it does not exist; Refusal if it is damaged, or no checkpoint of this
    project.
    """
    _require_file(path)
    with naming(path):
        with zipfile.ZipFile(path) as archive:  # torch.load does not compare the checksums
            damaged = archive.testzip()
        if damaged:
            raise ValueError(f"the checksum of {damaged} is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(checkpoint, dict) or not checkpoint.keys() >= PARTS:
            raise ValueError("gcfed did not write it")
    return checkpoint


class Weights(NamedTuple):
    """A global network in a file.

    Attributes:
        tensors: by their names in the network.
        rounds: that trained it.
        scaling: the means and deviations that scaled its inputs and targets; None if the file does
            not tell them.
        classes: their names; empty if the file does not tell them.
    """

    tensors: dict[str, Tensor]
    rounds: int
    scaling: Scaling | None
    classes: Sequence[str]


def load_weights(path: str) -> Weights:
    """The global network in a checkpoint or an exported model."""
    if Path(path).suffix != EXPORT.suffix:
        checkpoint = load_checkpoint(path)
        with naming(path):
            record = checkpoint["gcfed"]
            scaling = _arrays(record.get("scaling"))
            classes = [*map(str, record.get("classes", ()))]
            return Weights(net_of(checkpoint), int(checkpoint["global_step"]), scaling, classes)
    try:
        with naming(path), safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no dict)
            scaling = _arrays(json.loads(metadata.get("scaling", "null")))
            classes = [*map(str, json.loads(metadata.get("classes", "[]")))]
            return Weights(tensors, int(metadata.get("round", 0)), scaling, classes)
    except SafetensorError as error:
        raise Refusal(
            f"ckpt_path={path} is damaged, or no model of this project: {error}"
        ) from error


def _arrays(lists: Mapping[str, Sequence[float]] | None) -> Scaling | None:
    if lists is None:
        return None
    return {name: np.array(values, float) for name, values in lists.items()}


def scaling_in(path: Path) -> Scaling | None:
    """The scaling that the file of ``model.start`` tells; None if it tells none, as a stranger's.

    Raises Refusal if it tells anything else than numbers.
    """
    with naming(path, "model.start"):
        if path.suffix == EXPORT.suffix:
            with safe_open(path, "pt") as file:
                return _arrays(json.loads((file.metadata() or {}).get("scaling", "null")))
        content = torch.load(path, map_location="cpu", weights_only=True)
        record = content.get("gcfed")
        return _arrays(record.get("scaling")) if isinstance(record, Mapping) else None


def warn_of_other_scaling(
    setting: str, theirs: Scaling | None, ours: Mapping[str, Sequence[float]]
) -> None:
    """Warns if a model's run scaled the inputs by other numbers than these settings do, or if only
    one of them scales.

    Own data are scaled by the means and deviations of the training samples, which depend on the
    run's settings.

    Args:
        setting: what names the file, such as ``ckpt_path=a.safetensors``.
        theirs: None if the file does not tell them.
    """
    if theirs is None:
        return
    for name in sorted(theirs.keys() | ours.keys()):
        if name in theirs and name in ours and _are_close(theirs[name], np.array(ours[name])):
            continue
        log.warning(
            "%s: its run scaled the inputs or targets by other numbers (%s) than these settings"
            " give, so the network sees other inputs than in its training. For the same data, set"
            " seed, data.client_test, data.limit_train, data.standardize and data.validation as in"
            " its run",
            setting,
            name,
        )
        return


def warn_of_other_classes(path: Path, theirs: Sequence[str], ours: Sequence[str]) -> None:
    """Warns if an output of a model is another class than in these data.

    Args:
        theirs, ours: the names of the classes; empty if they are not known.
    """
    for number, (there, here) in enumerate(zip(theirs, ours, strict=False)):
        if there != here:
            log.warning(
                "ckpt_path=%s: output %d of the model is the class %s in its run, and %s in these"
                " data",
                path,
                number,
                there,
                here,
            )
            return


def _are_close(there: ndarray, here: ndarray) -> bool:
    return there.shape == here.shape and np.allclose(there, here, 1e-4, 1e-6)


def net_of(checkpoint: Content) -> dict[str, Tensor]:
    """The network's tensors in a checkpoint, by their names in the network."""
    tensors = {}
    for key, value in checkpoint["state_dict"].items():
        if key.startswith("net."):
            tensors[key.removeprefix("net.")] = value
    return tensors


def require_fitting(
    module: FederatedModule, theirs: dict[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """Returns ``theirs``, a file's tensors.

    Raises Refusal if names or shapes differ from the network's.
    """
    differing = differences(_shapes(theirs), _shapes(module.net.state_dict()), most=4)
    if differing:
        raise Refusal(
            f"ckpt_path={path} holds another model than {type(module.net).__name__}: {differing}. "
            "Set model=… and data=… as in the run that wrote it."
        )
    return theirs


def _shapes(state: Content) -> dict[str, tuple[int, ...]]:
    """The shapes of a state's tensors. A module's extra state may be anything else."""
    return {name: tuple(t.shape) for name, t in state.items() if isinstance(t, Tensor)}
