"""Run folders: reads them, finds out how each run ended, and names the folder of the next run."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from gcfed.folders.identity import counted, differences, digest, identity, leaves
from gcfed.folders.reading import (
    FEATURE_SKEW,
    GLOBAL_TESTS,
    LABEL_SKEW,
    column,
    read_metrics,
    read_summary,
    read_yaml,
)
from gcfed.utils.compose import is_override
from gcfed.utils.machine import job, leads
from gcfed.utils.refusal import MissingFile, Refusal
from gcfed.utils.resolvers import ROOT, register

if TYPE_CHECKING:
    import pandas as pd
    from pydantic import TypeAdapter

log = logging.getLogger(__name__)
# Files of a run.
CONFIG = "config.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.csv"
FAILURE = "failure.txt"
CHECKPOINT = Path("checkpoints") / "last.ckpt"
EXPORT = Path("global_model.safetensors")
# Files of a search.
TRIALS = "trials.csv"
RESULTS = "optimization_results.yaml"
STORAGE = "search.db"
# States of a run.
FINISHED = "finished"
DIVERGED = "diverged"  # see divergence()
FAILED = "failed"  # an error or a signal ended it
UNFINISHED = "unfinished"  # it was killed or is running
STATES = (FINISHED, DIVERGED, FAILED, UNFINISHED)


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder."""

    folder: Path
    config: Mapping[str, Any]  # {} if it cannot be read
    summary: Mapping[str, Any]  # {} if the run has not ended
    metrics: pd.DataFrame  # by round, NaN where nothing was measured
    state: str  # one of STATES
    note: str  # why it is in this state; "" for a finished run

    @cached_property
    def leaves(self) -> dict[str, Any]:
        return leaves(self.config)

    @cached_property
    def identity(self) -> str:
        return digest(self.leaves)

    @property
    def seed(self) -> int:
        return self.config.get("seed", 0)

    @property
    def planned(self) -> int:
        """The number of rounds in the config."""
        return self.config.get("rounds", 0)

    @property
    def rounds(self) -> int:
        """The number of finished rounds."""
        return int(self.metrics.index[-1]) if len(self.metrics) else 0

    @property
    def result(self) -> str:
        """The column that the run's methods declare as their result; "" for the global model's
        test.
        """
        column = self.summary.get("result") or ""
        return "" if column in GLOBAL_TESTS else column

    @property
    def has_ended(self) -> bool:
        return self.state in (FINISHED, DIVERGED)

    def get(self, key: str, default: Any = None) -> Any:
        """The config's value at a dotted key."""
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part, default) if isinstance(node, Mapping) else default
        return node

    def curve(self, name: str) -> pd.Series:
        """A column of the metrics in the rounds that measured it; empty if none did.

        Infinities stay.
        """
        return column(self.metrics, name)


def find_runs(roots: Iterable[str | Path]) -> list[Run]:
    """Every run below the roots, sorted by path.

    Folders within a run are left out, and so are links.
    """
    found = set[str]()
    for root in map(Path, roots):
        if not root.is_dir():
            raise MissingFile(
                f"roots={root}: there is no such folder. Runs are in {ROOT / 'logs'} by default."
            )
        for name, below, files in os.walk(root):
            if _has_run(files):
                found.add(os.path.realpath(name))
                below.clear()
    return [read_run(Path(folder)) for folder in sorted(found)]


def _has_run(files: Sequence[str]) -> bool:
    """Whether these files of a folder belong to a run that was accepted."""
    if CONFIG not in files:
        return False
    return any(name in files for name in ("partition.npz", METRICS, SUMMARY, FAILURE))


def read_run(folder: Path) -> Run:
    """Reads one folder. If a file cannot be read, the run counts as failed and has no config."""
    try:
        config = read_yaml(folder / CONFIG)
        summary = read_summary(folder / SUMMARY)
        metrics = read_metrics(folder / METRICS)
        _check_types(config, summary)
        state, note = ending(folder, config["rounds"], summary, metrics)
        run = Run(folder, config, summary, metrics, state, note)
        run.identity  # noqa: B018  # raises if a value has no text
    except Exception as error:  # a damaged or foreign folder
        why = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return Run(folder, {}, {}, read_metrics(None), FAILED, f"its files cannot be read: {why}")
    return run


def _check_types(config: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Raises ValueError if a value that reports compute with is of another type."""
    from gcfed.utils.checked import validated  # late: Hydra asks for folders at its start

    for key, kind in _rules()[CONFIG].items():
        validated(key, config.get(key), kind)
    for key, kind in _rules()[SUMMARY].items():
        validated(f"{key} in {SUMMARY}", summary.get(key), kind)


@cache
def _rules() -> dict[str, dict[str, TypeAdapter]]:
    """The types of the values that reports compute with, by file and key."""
    from gcfed.utils.checked import Number, Whole, rule

    texts = dict.fromkeys(("data", "ended", "result", "stopped"), rule(str | None))
    skews = dict.fromkeys((*LABEL_SKEW, FEATURE_SKEW), rule(Number | None))
    return {
        CONFIG: {
            "rounds": rule(Whole),
            "seed": rule(Whole | None),
            "eval_every": rule(Whole | None),
            "targets": rule(Sequence[Number] | None),
        },
        SUMMARY: {"rounds": rule(Whole | None), **texts, **skews},
    }


def ending(
    folder: Path, planned: int, summary: Mapping[str, Any], metrics: pd.DataFrame
) -> tuple[str, str]:
    """The state and the note of a run of ``planned`` rounds."""
    if summary and metrics.empty:
        return FAILED, f"it has ended, but its {METRICS} is missing"
    broken = divergence(metrics)
    rounds = 0 if metrics.empty else int(metrics.index[-1])
    if _has_ended(summary, planned, rounds):
        return (DIVERGED, broken) if broken else (FINISHED, "")
    where = f"after round {rounds} of {planned}"
    failure = folder / FAILURE
    if failure.is_file():
        lines = failure.read_text(encoding="utf-8", errors="replace").splitlines()
        message = lines[0][:1000] if lines else "an error without a message"
        return FAILED, f"{where}: {message}"
    return UNFINISHED, f"{where}; {broken}" if broken else where


def _has_ended(summary: Mapping[str, Any], planned: int, rounds: int) -> bool:
    """Whether the summary is that of the whole run, which has finished so many rounds."""
    if not summary:
        return False
    if summary.get("rounds", 0) >= planned:
        return True
    # A run that stopped early may have been continued.
    return "stopped" in summary and summary.get("rounds", rounds) == rounds


def divergence(metrics: pd.DataFrame) -> str:
    """Why a run with these metrics counts as diverged; "" if it does not."""
    if metrics.empty:
        return ""
    last = metrics.iloc[-1]
    if 0 < last.get("train/nonfinite_clients", 0) == last.get("train/clients"):
        return f"no client of round {last.name} sent finite numbers"
    losses = column(metrics, "test/loss")
    if len(losses) and abs(losses.iloc[-1]) == float("inf"):
        return f"the test loss of round {losses.index[-1]} is not finite"
    return ""


def with_folder(cfg: DictConfig) -> DictConfig:
    """A copy of the config whose ``paths.output_dir`` is an absolute path.

    The folder is new if the user has not named one and the run does not continue an earlier one.
    """
    chosen = OmegaConf.to_container(cfg.paths, resolve=False)["output_dir"].startswith("${run_dir:")  # type: ignore
    folder = Path(cfg.paths.output_dir).absolute()
    if chosen and cfg.ckpt_path is None and job() is None and leads():
        folder = new_folder(folder)
    cfg = deepcopy(cfg)
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

    Reading the data logs lines, so the log may exist. Also removes empty folders between it
    and ``paths.log_dir``.
    """
    if cfg.paths is None:
        return
    folder = Path(cfg.paths.output_dir)
    logs = {f"{HydraConfig.get().job.name}.log"} if HydraConfig.initialized() else set[str]()
    with suppress(OSError):  # no such folder, or one that is not empty
        if {path.name for path in folder.iterdir()} <= logs:
            for name in logs:
                (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    for parent in folder.parents:
        if not parent.is_relative_to(cfg.paths.log_dir) or parent == Path(cfg.paths.log_dir):
            break
        with suppress(OSError):
            parent.rmdir()


def check_folder(cfg: DictConfig, folder: Path) -> None:
    """Raises ValueError if the folder holds rounds of a run that this run does not continue.

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
    if ckpt_path == "last":
        folder = _newest_with(Path(base), identity(_root_))
        if folder is not None:
            return str(folder)
    elif isinstance(ckpt_path, str) and Path(ckpt_path).parent.name == "checkpoints":
        return str(Path(ckpt_path).parent.parent)
    return str(Path(base) / (job() or _folder_name(now, changed)))


def _folder_name(now: str, changed: str) -> str:
    """The time and the overrides, with a digest if not all of them fit into the name."""
    kept = brief(changed)
    words = [re.sub(r"[^\w.+-]+", "-", kept.replace(",", "_")).strip("-_")]
    if kept != changed:
        words.append(digest({"": changed}))
    overrides = "-".join(filter(None, words))
    return "_".join(filter(None, (now, overrides)))


def _newest_with(base: Path, wanted: str) -> Path | None:
    """The folder of the newest checkpoint of a run with this identity; None if there is none."""
    checkpoints = [*base.glob(f"*/{CHECKPOINT}")]
    checkpoints.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in checkpoints:
        folder = path.parent.parent
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
    if ckpt_path == "last":
        # Hydra has no config for a sweep as a whole: compare the command line with that of earlier
        # sweeps.
        mine = counted(word for word in sys.argv[1:] if is_override(word))
        for written in sorted(Path(base).glob("multirun_*/multirun.yaml"), reverse=True):
            of_sweep = OmegaConf.select(OmegaConf.load(written), "hydra.overrides.task") or ()
            if counted(of_sweep) == mine:
                return str(written.parent)
    return str(Path(base) / datetime.now().strftime("multirun_%Y-%m-%d_%H-%M-%S-%f"))


def job_dir(overrides: str) -> str:
    """The folder of a sweep's job: its overrides, with a digest if some are left out or have a
    slash.
    """
    name = re.sub(r"[/\\]", "-", brief(overrides))
    if name == overrides:
        return name
    return f"{name}-{digest({'': overrides})}".lstrip("-")


register("run_dir", run_dir, replace=True)
register("job_dir", job_dir, replace=True)
register("sweep_dir", sweep_dir, replace=True, use_cache=True)
