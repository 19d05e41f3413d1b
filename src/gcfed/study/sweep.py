"""A study as a sweep: runs the jobs that are not finished, and names those that failed."""

import logging
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gcfed.runs.folder import CHECKPOINT, RESULTS, SUMMARY, TRIALS, Run, find_runs, read_run
from gcfed.runs.identity import differences, digest, leaves
from gcfed.runs.reading import mapping, read_yaml
from gcfed.study.jobs import Job, is_in_process, launch, read_jobs
from gcfed.utils.compose import Composer
from gcfed.utils.files import locked
from gcfed.utils.words import say

log = logging.getLogger(__name__)
Compose = Callable[[Sequence[str]], Any]
STOP = "callbacks.early_stopping"
FINISHED, BEGUN, NEW, OTHER = "finished", "to continue", "to start", "not to be run"


@dataclass
class Work:
    """A job with its config, what identifies its run, the folder of that and the state there."""

    job: Job
    cfg: DictConfig
    leaves: dict[str, Any]
    folder: Path
    state: str = NEW
    rounds: int = 0
    why: str = ""  # the state is OTHER: a run that is not the job's

    def look(self) -> None:
        """Reads the folder anew."""
        self.state, self.rounds, self.why = NEW, 0, ""
        begun, asked = (self.folder / CHECKPOINT).is_file(), self.cfg.rounds
        if not begun and not (self.folder / SUMMARY).is_file():
            return
        run = read_run(self.folder)
        self.rounds, self.why = run.rounds, self.lack(run)
        stopped = "stopped" in run.summary and run.planned == asked and OmegaConf.select(self.cfg, STOP)
        if not self.why and run.has_ended and (run.rounds == asked or stopped):
            self.state = FINISHED
        elif not self.why and begun and 0 < run.rounds <= asked:
            self.state = BEGUN
        else:
            rounds = f"{run.rounds} rounds are done there, {asked} are asked for"
            self.state, self.why = OTHER, self.why or rounds + ", and there is no checkpoint" * (not begun)

    def lack(self, run: Run) -> str:
        """Why a run is not the job's: another identity or early end, or fewer measurements than it asks for; or ""."""
        if odd := differences(run.leaves, self.leaves) if run.config else run.note:
            return odd
        there, here = (min(n, self.cfg.rounds) for n in (run.get("eval_every") or 1, self.cfg.eval_every))
        if there != here:  # the last round is always tested
            return f"eval_every is {there} there, {here} here"
        for name, asked in self.beside.items():
            if not (has := run.get(name)):
                return f"it has no {name.replace('.', '=', 1)}"
            for key, value in asked.items():
                if "${" not in str(value) and has.get(key) != value:  # else it follows other keys
                    return f"{name}.{key} is {has.get(key)} there, {value} here"
        return ""

    @property
    def beside(self) -> dict[str, Any]:
        """What it asks for that is no part of its identity: its metrics, and what may end it early, by dotted key."""
        nodes = {f"metrics.{name}": node for name, node in (self.cfg.metrics or {}).items()}
        nodes[STOP] = OmegaConf.select(self.cfg, STOP)
        return {name: OmegaConf.to_container(node) for name, node in nodes.items() if node}


def sweep(config: DictConfig, context: Any, launcher: Any, arguments: list[str]) -> None:
    """Runs the jobs of ``configs/study/<name>.yaml`` that are not finished; the launcher is the user's choice.

    Hydra's own launcher gets one job after the other, another one all at once. Exit code 1 if a job is not finished.
    Of a study, a part of it or a folder that is not as it must be an error says so before any job.
    """
    name, loader = config.hydra.runtime.choices.get("study"), context.config_loader
    if name is None:
        raise ValueError("hydra/sweeper=study needs a study: python src/train.py -m study=<a file of configs/study>.")
    compose = Composer(lambda overrides: loader.load_sweep_config(config, overrides), set(loader.list_groups("")))
    node: Any = OmegaConf.to_container(config.study)
    jobs, gaps = read_jobs(config.scale, node, arguments)
    root = Path(config.hydra.sweep.dir).absolute()
    failures, trials = dict[str, str](), list[Any]()
    if node.get("search") is not None:
        dry_run = bool(node.get("dry_run"))
        jobs, failures, trials = tune(jobs, node["search"], root, compose, config, context, launcher, dry_run=dry_run)
    works = look_up(jobs, root, Path(config.paths.log_dir) / "study", compose)
    title, number = f"study {name}, scale {config.scale}", Counter(work.state for work in works)
    say(f"{title}: {len(works)} jobs in {root}", f"  {', '.join(f'{number[s]} {s}' for s in (FINISHED, BEGUN, NEW))}")
    for why, count in gaps.items():
        say(f"  left out: {count} cells, {why}")
    say(*(f"  not to be run: {job}: {why}" for job, why in failures.items()))
    for work in (work for work in works if work.state == OTHER):
        say(f"  not to be run: {work.job.title}: {work.folder} holds another run: {work.why}.")
    if number[OTHER]:
        say("  Move such folders away, ask for what their runs have, or set paths.log_dir=<folder>.")
    left = [work for work in works if work.state in (BEGUN, NEW)]
    if node.get("dry_run"):
        from gcfed.study.cost import estimate  # torch

        say(*(f"  {work.state:<13} {work.job.title}  ({work.folder.name})" for work in works))
        runs = [(work.cfg, work.cfg.rounds - work.rounds) for work in left]
        say(*(f"  {line}" for line in estimate([*trials, *runs])))
        return
    reasons: dict[str, str] = {}
    for i, batch in enumerate([[work] for work in left] if is_in_process(launcher) else [left]):
        reasons |= run(batch, f"job {i + 1} of {len(left)}", i, root, launcher)
    roots = ",".join(sorted({str(work.folder.parent) for work in works}))
    papers = [f"papers=[{node['table']}]"] * isinstance(node["table"], str)
    say(f"report: python src/report.py {shlex.join([f'roots=[{roots}]', *papers])}")
    end(title, works, reasons, failures)


def tune(
    jobs: Sequence[Job], node: Any, root: Path, compose: Compose, config: Any, context: Any, launcher: Any, *,
    dry_run: bool = False,
) -> tuple[list[Job], dict[str, str], list[tuple[DictConfig, int]]]:  # fmt: skip
    """A study's jobs with the best that a search of each cell found, all with the same number of trials.

    ``node`` is ``study.search`` (:class:`gcfed.study.space.Tuning`); the searches lie in ``searches/<row>_<column>``
    below the study's folder, ``root``. Second, by title, why jobs are left out whose search found nothing. A dry run
    searches for nothing and takes what was found; third, the trials to come: configs and rounds. ValueError, before any
    search: a config that cannot be, words that cannot be searched, or a seed of the searches that a job has, too.
    """
    from gcfed.study.search import search  # Optuna, an extra; a trial that fails is one of the budget
    from gcfed.study.space import Settings, read_tuning

    tuning = read_tuning(node)
    own = {field.name: getattr(tuning, field.name) for field in fields(Settings)}
    cells = {job.cell: job for job in jobs}  # of any seed, which a search has of its own
    params = {cell: dict(tuning.params) for cell in cells}
    for override, more in tuning.knobs.items():
        having = [cell for cell, job in cells.items() if override in job.overrides]
        for cell in having:
            params[cell] |= more
        if not having:
            say(f"no job has {override}: study.search.knobs has {', '.join(more)} for nothing")
    if dry_run:
        say(f"{len(cells)} searches of {tuning.n_trials} trials each, unless they have ended, count below, as runs do")
    searches = {}
    for cell, job in cells.items():
        common = [override for override in job.overrides if not override.startswith("seed=")]
        job = job._replace(overrides=[*common, *(tuning.overrides or ())])
        searches[cell] = work_of(job, root / "searches" / cell, compose)
    seeds = {f"seed={seed}" for trial in searches.values() for seed in tuning.seeds or [trial.cfg.seed]}
    if both := sorted(seeds & {override for job in jobs for override in job.overrides}):
        raise ValueError(f"{both[0]} is of a search and of a run: set study.seeds, or study.search.seeds, to others.")
    found, failures, trials = dict[str, list[str]](), dict[str, str](), list[tuple[DictConfig, int]]()
    for cell, trial in searches.items():
        left = dry_run * max(0, tuning.n_trials - len([*trial.folder.glob("trial_*")]))
        trials += [(trial.cfg, trial.cfg.rounds)] * left * len(tuning.seeds or [trial.cfg.seed])
        if not dry_run:
            say(f"search for {trial.job.title.rpartition(', seed')[0]}")
            place = {"hydra": {"sweep": {"dir": str(trial.folder)}}, "optimized_metric": tuning.metric}
            asked = own | {"params": params[cell]}
            search(OmegaConf.merge(config, place), context, launcher, trial.job.overrides, **asked)
        file = trial.folder / RESULTS
        if not (file.is_file() or left):
            why = f"no trial of its search has a value, as {trial.folder / TRIALS} says"
            failures[cell] = f"{why}; a larger study.search.n_trials goes on"
            continue
        best_params = mapping(f"{file}: best_params", read_yaml(file).get("best_params") if file.is_file() else None)
        found[cell] = [f"{key}={value}" for key, value in best_params.items()]
    tuned = [job._replace(overrides=[*job.overrides, *found[job.cell]]) for job in jobs if job.cell in found]
    return tuned, {job.title: failures[job.cell] for job in jobs if job.cell in failures}, trials


def work_of(job: Job, folder: Path, compose: Compose) -> Work:
    """The job with its config; ValueError, with its title, where that cannot be."""
    try:
        cfg = compose(job.overrides)
        return Work(job, cfg, leaves(cfg), folder)
    except (ValueError, OmegaConfBaseException) as error:
        raise ValueError(f"{job.title}: {' '.join(str(error).split())}") from None


def look_up(jobs: Sequence[Job], root: Path, shelf: Path, compose: Compose) -> list[Work]:
    """Each different run once, with its folder's state; a finished one of another study below ``shelf`` counts."""
    runs = [run for run in find_runs([shelf]) if run.has_ended] if shelf.is_dir() else []
    works: dict[Any, Work] = {}
    for job in jobs:
        work = work_of(job, root / job.folder, compose)
        key = digest(work.leaves), work.cfg.rounds
        if works.setdefault((*key, work.cfg.eval_every, str(work.beside)), work) is not work:
            continue  # the same run as another cell's
        work.look()
        twins = [run for run in runs if (run.identity, run.rounds) == key and not work.lack(run)]
        if twins and work.state != FINISHED:
            work.folder, work.state, work.why = twins[0].folder, FINISHED, ""
    return list(works.values())


def run(batch: Sequence[Work], name: str, first: int, root: Path, launcher: Any) -> dict[str, str]:
    """Runs those jobs of a batch that nobody is at or has finished meanwhile; why others are not run, by title."""
    mine: list[Work] = []
    reasons: dict[str, str] = {}
    with ExitStack() as locks:
        for work in batch:
            holder = locks.enter_context(locked(root / ".locks" / work.job.folder))
            work.look()
            if holder or work.state not in (BEGUN, NEW):
                reasons[work.job.title] = f"{holder} is at it" if holder else work.why or "it is finished by now"
                say(f"skipped: {work.job.title}; {reasons[work.job.title]}")
                continue
            mine.append(work)
            if len(batch) == 1:
                say(f"{name}: {work.job.title}", f"  {work.folder}")
        found = launch(launcher, [(work.job.overrides, work.folder) for work in mine], first) if mine else []
    for work, reason in zip(mine, found, strict=True):
        if reason:
            log.error("failed: %s, %s", work.job.title, reason)
            reasons[work.job.title] = reason
    return reasons


def end(title: str, works: Sequence[Work], reasons: dict[str, str], failures: dict[str, str]) -> None:
    """Says how the study ended, as the folders have it; exit code 1 if a job is not finished, or none was made."""
    lines = [f"  {job}: {why}" for job, why in failures.items()]
    for work in works:
        work.look()
        if work.state != FINISHED:
            why = reasons.get(work.job.title) or work.why or "it was stopped"
            lines += [f"  {work.job.title}: {why}\n    {work.folder}"]
    if not lines:
        say(f"{title}: all {len(works)} jobs are finished")
        return
    jobs = len(works) + len(failures)
    head = f"{title}: {jobs - len(lines)} of {jobs} jobs are finished; these are not:"
    log.error("\n".join([head, *lines, "The same command tries them again. To start one anew, move its folder away."]))
    raise SystemExit(1)
