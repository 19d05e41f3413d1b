"""The folder of the next run: its name, whether it may be used, and the resolvers that configs ask
for it.
"""

import logging
import re
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from copy import deepcopy
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from gcfed.folders.folder import CHECKPOINT, CONFIG, EXPORT, METRICS, SUMMARY
from gcfed.folders.identity import (
    changing_results,
    differences,
    digest,
    identity,
    leaves,
)
from gcfed.folders.reading import read_yaml
from gcfed.utils.compose import is_override
from gcfed.utils.home import expand_home
from gcfed.utils.machine import launch_folder, leads
from gcfed.utils.refusal import Refusal
from gcfed.utils.resolvers import register

log = logging.getLogger(__name__)


def with_folder(cfg: DictConfig) -> DictConfig:
    """A copy of the config whose ``paths.output_dir`` is an absolute path, with the home folder in
    place of ``~/``.

    The folder is new if the user has not named one and the run does not continue an earlier one.
    """
    cfg = deepcopy(cfg)
    expand_home(cfg)
    chosen = OmegaConf.to_container(cfg.paths, resolve=False)["output_dir"].startswith("${run_dir:")  # type: ignore
    folder = Path(cfg.paths.output_dir).absolute()
    if chosen and cfg.ckpt_path is None and launch_folder() is None and leads():
        folder = new_folder(folder)
    cfg.paths.output_dir = str(folder)
    return cfg


def new_folder(path: Path) -> Path:
    """Makes a folder that did not exist: ``path``, else ``path_2`` and so on."""
    for number in count(1):
        folder = path.with_name(f"{path.name}_{number}") if number > 1 else path
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def remove_refused(cfg: DictConfig) -> None:
    """Removes the folder of a run that was refused before it began: it has no file but its log.

    Reading the data logs lines, so the log may exist. Also removes empty folders between it and
    ``paths.log_dir``.
    """
    if cfg.paths is None:
        return
    # a path may be the setting that was refused, so it may be a number or None
    folders = {str(cfg.paths.output_dir)}
    logs = set[str]()
    if HydraConfig.initialized():
        command = HydraConfig.get()
        folders.add(command.runtime.output_dir)
        logs.add(f"{command.job.name}.log")
    root = Path(str(cfg.paths.log_dir)).expanduser().absolute()
    for folder in folders:
        _remove_without_files(Path(folder).expanduser().absolute(), logs, root)


def _remove_without_files(folder: Path, logs: Collection[str], root: Path) -> None:
    """Removes a folder that has no file but ``logs``, and the empty folders between it and
    ``root``.
    """
    with suppress(OSError):  # no such folder, or one that is not empty
        if {path.name for path in folder.iterdir()} <= {*logs}:
            for name in logs:
                (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    for parent in folder.parents:
        if not parent.is_relative_to(root) or parent == root:
            break
        with suppress(OSError):
            parent.rmdir()


def check_folder(cfg: DictConfig, folder: Path) -> None:
    """Raises Refusal if the folder holds rounds of a run that this run does not continue.

    A run that was killed before its first checkpoint may begin again, because its rounds will be
    equal.
    """
    if cfg.ckpt_path == "last":
        return  # the checkpoint names its run
    kept = [
        *folder.glob(f"{CHECKPOINT.parent}/[!.]*.ckpt"),
        *folder.glob(SUMMARY),
        *folder.glob(EXPORT.name),
    ]
    has_rows = (folder / METRICS).is_file() and (folder / METRICS).read_text().count("\n") > 1
    if not kept and not has_rows:
        return
    config = folder / CONFIG
    difference = f"it has no {CONFIG}"
    if config.is_file():
        difference = differences(leaves(read_yaml(config)), leaves(cfg))
    if difference:
        raise Refusal(
            f"{folder} holds another run: {difference}. Name another folder, or move that one away."
        )
    if kept and cfg.ckpt_path is None:
        raise Refusal(
            f"{folder} holds this run already: continue it with ckpt_path=last, or name another"
            " folder."
        )


def run_config(words: Sequence[str]) -> Path | None:
    """The ``config.yaml`` of the run to which ``ckpt_path=`` belongs; None if ``words`` choose a
    model or data.
    """
    if any(re.match(r"(model|data|experiment)=", word) for word in words):
        return None
    named = [word for word in words if word.startswith("ckpt_path=")]
    if not named:
        return None
    parsed = OverridesParser.create().parse_overrides(named)
    path = Path(str(parsed[0].value()))
    if not path.is_file():
        return None
    folder = path.parent
    if folder.name == "checkpoints":
        folder = folder.parent
    config = folder / CONFIG
    if not config.is_file():
        raise Refusal(
            f"ckpt_path={path}: there is no {config}. Name the settings of its run: model=…"
            " data=… …"
        )
    return config.resolve()


def run_dir(base: str, ckpt_path: Any, now: str, changed: str = "", *, _root_: Any) -> str:
    """The folder of a run: ``<base>/<now>_<changed>``, or that of the run which ``ckpt_path``
    continues.

    ``changed`` are the overrides; ``-`` replaces letters that Hydra does not accept in a
    ``ckpt_path``. ``ckpt_path=last`` is the newest run below ``base`` that has a checkpoint and the
    identity of this config.
    """
    runs = Path(base).expanduser()
    if ckpt_path == "last":
        folder = _newest_with(runs, identity(_root_))
        if folder is not None:
            return str(folder)
    elif isinstance(ckpt_path, str) and Path(ckpt_path).parent.name == "checkpoints":
        return str(Path(ckpt_path).expanduser().parent.parent)
    return str(runs / (launch_folder() or _folder_name(now, changed)))


def _folder_name(now: str, changed: str) -> str:
    """The time and the overrides, with a digest if not all of them fit into the name."""
    kept = brief(changed)
    words = [re.sub(r"[^\w.+-]+", "-", kept.replace(",", "_")).strip("-_")]
    if kept != changed:
        words.append(digest({"": changed}))
    overrides = "-".join(filter(None, words))
    return "_".join(filter(None, (now, overrides)))


def newest_first(base: Path) -> list[Path]:
    """The folders of the runs below that have a checkpoint."""
    checkpoints = sorted(base.glob(f"*/{CHECKPOINT}"), key=lambda path: path.stat().st_mtime)
    return [path.parent.parent for path in reversed(checkpoints)]


def _newest_with(base: Path, wanted: str) -> Path | None:
    """The folder of the newest checkpoint of a run with this identity; None if there is none."""
    for folder in newest_first(base):
        try:
            if identity(read_yaml(folder / CONFIG)) == wanted:
                return folder
        except Exception as error:  # a damaged file
            log.warning("%s is skipped: %s", folder, error)
    return None


def brief(overrides: str) -> str:
    """As many overrides as fit into 80 bytes, the shortest first.

    None is cut, and none with a dict is kept.
    """
    words = re.split(r",(?![^\[({]*[\])}])", overrides)  # not at the commas within brackets
    kept: list[str] = []
    for word in sorted(words, key=len):
        if "{" not in word and len(",".join([*kept, word]).encode()) <= 80:
            kept.append(word)
    return ",".join(word for word in words if word in kept)


def sweep_dir(base: str, ckpt_path: str | None) -> str:
    """A new folder for a sweep; with ``ckpt_path=last`` the folder of the newest sweep with the
    same overrides.
    """
    sweeps = Path(base).expanduser()
    if ckpt_path == "last":
        # Hydra has no config for a sweep as a whole: compare the command line with that of earlier
        # sweeps.
        mine = changing_results(word for word in sys.argv[1:] if is_override(word))
        for written in sorted(sweeps.glob("multirun_*/multirun.yaml"), reverse=True):
            of_sweep = OmegaConf.select(OmegaConf.load(written), "hydra.overrides.task") or ()
            if changing_results(of_sweep) == mine:
                return str(written.parent)
    return str(sweeps / datetime.now().strftime("multirun_%Y-%m-%d_%H-%M-%S-%f"))


def job_dir(overrides: str, sweep: str = "", ckpt_path: Any = None, *, _root_: Any = None) -> str:
    """The name of the folder of a sweep's job: its overrides, with a digest if some are left out or
    have a slash.

    With ``ckpt_path=last`` it is the job of the folder ``sweep`` that this one continues: it has
    the same identity, and may have had fewer rounds, which are in its name.
    """
    name = re.sub(r"[/\\]", "-", brief(overrides))
    if name != overrides:
        name = f"{name}-{digest({'': overrides})}".lstrip("-")
    if ckpt_path != "last" or (Path(sweep) / name / CHECKPOINT).is_file():
        return name
    folder = _newest_with(Path(sweep), identity(_root_))
    return name if folder is None else folder.name


register("run_dir", run_dir, replace=True)
register("job_dir", job_dir, replace=True)
register("sweep_dir", sweep_dir, replace=True, use_cache=True)
