"""The runs of a table's jobs: looks up what is done, and trains what is left."""

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gcfed.folders.folder import CHECKPOINT, CONFIG, SUMMARY, Run, find_runs, read_run
from gcfed.folders.identity import differences, digest, leaves
from gcfed.folders.lock import locked
from gcfed.tables.plan import Job
from gcfed.utils.compose import composed, quoted
from gcfed.utils.refusal import Refusal, message_of

STOP = "callbacks.early_stopping"
# States of a job.
DONE = "finished"
BEGUN = "to continue"
NEW = "to start"
OTHER = "not to be run"
#: What the process of a run calls: the command that a user types.
TRAIN_COMMAND = "from gcfed.commands import train; train()"


def train(overrides: Sequence[str], folder: Path) -> str:
    """Trains a run in a process of its own, from the folder's checkpoint if it has one.

    Returns why it failed, or "".
    """
    command = [sys.executable, "-c", TRAIN_COMMAND, *overrides, f"hydra.run.dir={quoted(folder)}"]
    if (folder / CHECKPOINT).is_file():
        command.append(f"ckpt_path={quoted(folder / CHECKPOINT)}")
    code = subprocess.run(command).returncode
    if not code:
        return ""
    has_begun = (folder / CONFIG).is_file()
    reason = read_run(folder).reason if has_begun else ""
    return reason or f"it ended with code {code}; see above"


@dataclass
class Work:
    """A job with its config, the leaves that identify its run, the run's folder, and the state
    there.
    """

    job: Job
    cfg: DictConfig
    leaves: dict[str, Any]
    folder: Path
    state: str = NEW
    rounds: int = 0
    why: str = ""  # why the folder's run is not the job's (state OTHER), or why it is not finished

    def refresh(self) -> None:
        """Reads the folder again."""
        self.state = NEW
        self.rounds = 0
        self.why = ""
        has_checkpoint = (self.folder / CHECKPOINT).is_file()
        if not has_checkpoint and not (self.folder / SUMMARY).is_file():
            return
        run = read_run(self.folder)
        asked = self.cfg.rounds
        self.rounds = run.rounds
        self.why = self.difference_to(run)
        if self.why:
            self.state = OTHER
        elif run.has_ended and (run.rounds == asked or self._stopped_early(run)):
            self.state = DONE
        elif has_checkpoint and 0 < run.rounds <= asked:
            self.state = BEGUN
        else:
            self.state = OTHER
            self.why = f"{run.rounds} rounds are done there, {asked} are asked for"
            if not has_checkpoint:
                self.why += ", and there is no checkpoint"

    def _stopped_early(self, run: Run) -> bool:
        asks = bool(OmegaConf.select(self.cfg, STOP))
        return asks and "stopped" in run.summary and run.planned == self.cfg.rounds

    def difference_to(self, run: Run) -> str:
        """Why a run is not the job's: another identity, other tests, fewer measurements; "" if it
        is the job's.
        """
        differing = differences(run.leaves, self.leaves) if run.config else run.reason
        if differing:
            return differing
        # the last round is always tested
        there = min(run.get("eval_every") or 1, self.cfg.rounds)
        here = min(self.cfg.eval_every, self.cfg.rounds)
        if there != here:
            return f"eval_every is {there} there, {here} here"
        for name, asked in self.measurements.items():
            has = run.get(name)
            if not isinstance(has, Mapping):
                return f"it has no {name.replace('.', '=', 1)}"
            for key, value in asked.items():
                # an interpolation follows other keys
                if "${" not in str(value) and has.get(key) != value:
                    return f"{name}.{key} is {has.get(key)} there, {value} here"
        return ""

    def get(self, key: str) -> Any:
        """The config's value at a dotted key."""
        return OmegaConf.select(self.cfg, key)

    @property
    def measurements(self) -> dict[str, Any]:
        """Its metrics and its early stopping, by dotted key: they are not part of its identity."""
        nodes = {f"metrics.{name}": node for name, node in (self.cfg.metrics or {}).items()}
        nodes[STOP] = OmegaConf.select(self.cfg, STOP)
        return {name: OmegaConf.to_container(node) for name, node in nodes.items() if node}


def look_up(jobs: Mapping[str, Job], root: Path, logs: Path) -> dict[str, Work]:
    """Works by the folders of the jobs.

    Equal jobs are one run. A finished run anywhere below ``logs`` counts.
    """
    runs = []
    if logs.is_dir():
        runs = [run for run in find_runs([logs]) if run.has_ended]
    works: dict[tuple[object, ...], Work] = {}
    work_of: dict[str, Work] = {}
    for job in jobs.values():
        work = composed_work(job, root / job.folder)
        identity = (digest(work.leaves), work.cfg.rounds)
        key = (*identity, work.cfg.eval_every, str(work.measurements))
        if key not in works:
            works[key] = work
            work.refresh()
            twins = [run for run in runs if (run.identity, run.rounds) == identity]
            _take_twin(work, twins)
        work_of[job.folder] = works[key]
    return work_of


def composed_work(job: Job, folder: Path) -> Work:
    """Raises Refusal, with the job's title, for an override that cannot be composed."""
    try:
        cfg = composed(job.overrides)
        OmegaConf.update(cfg, "paths.output_dir", str(folder))
        return Work(job, cfg, leaves(cfg), folder)
    except (ValueError, OmegaConfBaseException) as error:
        raise Refusal(f"{job.title}: {message_of(error)}") from None


def check_cells(works: Iterable[Work], measures: Mapping[str, Mapping[str, str]]) -> None:
    """Raises Refusal, with the job's title, if a setting of its run cannot work, or if it does not
    write a measure.

    Args:
        works: a job of each cell.
        measures: the measures of each cell, each with the setting that names it.
    """
    from gcfed.assemble import check_buildable  # torch

    cells = {work.job.cell: work for work in works}
    for cell, work in cells.items():
        try:
            written = check_buildable(work.cfg)
            for measure, key in measures.get(cell, {}).items():
                written.require_measure(measure, key)
        except (ValueError, OSError) as error:
            raise Refusal(f"{work.job.title}: {message_of(error)}") from error


def _take_twin(work: Work, twins: Sequence[Run]) -> None:
    """Lets the work use a finished run of another folder, if there is one."""
    if work.state == DONE:
        return
    for run in twins:
        if not work.difference_to(run):
            work.folder = run.folder
            work.state = DONE
            work.why = ""
            return


def run(work: Work, number: str, root: Path) -> None:
    """Runs a job, unless another process is running it or has finished it."""
    with locked(root / ".locks" / work.job.folder) as holder:
        work.refresh()
        if holder or work.state not in (BEGUN, NEW):
            why = f"{holder} is running it" if holder else work.why or "it is finished by now"
            print(f"skipped: {work.job.title}; {why}", flush=True)
        else:
            print(f"job {number}: {work.job.title}\n  {work.folder}", flush=True)
            why = train(work.job.overrides, work.folder)
            work.refresh()
    work.why = work.why or why
