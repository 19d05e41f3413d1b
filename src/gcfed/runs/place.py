"""Where runs and sweeps write: a new folder, or that of the run which ``ckpt_path`` continues."""

from __future__ import annotations

import logging
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gcfed.runs.folder import CHECKPOINT, CONFIG
from gcfed.runs.identity import counted, digest, identity
from gcfed.runs.reading import read_yaml
from gcfed.utils.machine import job

log = logging.getLogger(__name__)


def run_dir(base: str, ckpt_path: Any, now: str, changed: str = "", *, _root_: Any) -> str:
    """Where a run writes: ``<base>/<now>_<changed>``, or in the folder of the run which ``ckpt_path`` continues.

    ``changed`` are the overrides, of which the name takes what Hydra reads in a ``ckpt_path``: TensorBoard shows it.

    ``ckpt_path=last`` is the newest run under ``base`` with a checkpoint and the identity of this config.
    """
    overrides = re.sub(r"[^\w.+-]+", "-", changed.replace(",", "_"))[:100].strip("-_")
    new = Path(base) / (job() or "_".join(filter(None, (now, overrides))))
    if not isinstance(ckpt_path, str):  # null, or what the run refuses
        return str(new)
    if ckpt_path != "last":
        path = Path(ckpt_path)
        return str(path.parent.parent if path.parent.name == "checkpoints" else new)
    wanted = identity(_root_)
    found = sorted(Path(base).glob(f"*/{CHECKPOINT}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in (path.parent.parent for path in found):
        try:
            if identity(read_yaml(folder / CONFIG)) == wanted:
                return str(folder)
        except ValueError as error:
            log.warning("%s is passed over: %s", folder, error)
    return str(new)


def sweep_dir(base: str, ckpt_path: str | None) -> str:
    """A new folder for a sweep; with ``ckpt_path=last`` that of the newest one with the same overrides, to continue."""
    if ckpt_path == "last":
        # Hydra has no config for a sweep as a whole: its jobs share what stands on the command line.
        words = (word for word in sys.argv[1:] if not word.startswith("-"))
        mine = counted(word for word in words if "=" in word or word.startswith("~"))
        for sweep in sorted(Path(base).glob("multirun_*/"), reverse=True):
            try:
                saved = read_yaml(sweep / "multirun.yaml")  # Hydra's own
                if counted(saved["hydra"]["overrides"]["task"]) == mine:
                    return str(sweep)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                log.warning("%s is passed over, its multirun.yaml cannot be read: %s", sweep, error)
    return str(Path(base) / datetime.now().strftime("multirun_%Y-%m-%d_%H-%M-%S-%f"))


def job_dir(overrides: str) -> str:
    """The name of a sweep's job: its overrides, as one folder of at most the 255 bytes that file systems take."""
    name = re.sub(r"[/\\]", "-", overrides)
    if name == overrides and len(name.encode()) <= 255:
        return name
    return f"{name.encode()[:200].decode(errors='ignore')}-{digest({'': overrides})}"


OmegaConf.register_new_resolver("run_dir", run_dir, replace=True)
OmegaConf.register_new_resolver("job_dir", job_dir, replace=True)
OmegaConf.register_new_resolver("sweep_dir", sweep_dir, replace=True, use_cache=True)
