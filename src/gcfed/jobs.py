"""Trains several runs, one after another or in processes of their own, and says how long the rest
takes.
"""

import os
import pickle
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from os.path import relpath
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from gcfed.folders.folder import FAILURE, SUMMARY
from gcfed.folders.identity import leaves
from gcfed.utils.compose import has_odd_letters, quoted
from gcfed.utils.idle import refuse_measure_of_search
from gcfed.utils.machine import cores, launched, leads
from gcfed.utils.refusal import Failed, Refusal

WAIT = 0.1  # seconds between two looks at the processes
#: What a process runs: it reads a config from its standard input.
TRAIN_FROM_STDIN = "from gcfed.jobs import train_from_stdin; train_from_stdin()"


def train_from_stdin() -> None:
    from gcfed.run import train

    cfg, quiet = pickle.load(sys.stdin.buffer)
    train(cfg, quiet=quiet)


@dataclass
class Progress:
    """Prints a line after each run: ``run 2 of 6: FedAvg, seed 1; about 3 min left``."""

    total: int
    quiet: bool
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    def finished(self, name: str) -> None:
        self.done += 1
        if self.quiet:
            return
        line = f"run {self.done} of {self.total}: {name}"
        if self.done < self.total:
            passed = time.monotonic() - self.started
            line += f"; {time_left(passed, self.done, self.total - self.done)}"
        print(line, flush=True)


def time_left(passed: float, done: int, left: int) -> str:
    """``about 12 min left``, if each job takes as long as those that are done.

    Args:
        passed: seconds of the jobs that are done.
        done: the number of these jobs, at least one.
        left: the number of the others.
    """
    return f"about {in_words(passed / done * left)} left"


def in_words(seconds: float) -> str:
    """``45 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"


class SweepProgress(Callback):
    """Prints a line before each job of a sweep or search: ``job 3 of 12, about 4 min left``.

    The time left is the number of jobs left, this one included, times the mean time of the jobs
    that this process has trained. Jobs that failed, and jobs that an earlier sweep had finished, do
    not count. So jobs in processes of their own have no time. The last line says how to compare
    the jobs of a sweep; a search has its own table.
    """

    def __init__(self) -> None:
        self.total: int | None = None
        self.started = 0.0
        self.had_ended = False
        self.times: list[float] = []
        self.root = Path()  # of the sweep
        self.num_done = 0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Ends the command before the first job if every job would be refused."""
        if is_basic(config):
            try:
                refuse_measure_of_search(config.hydra.overrides.task)
            except Refusal as error:
                raise Failed(error) from error
        self.total = jobs_of_sweep(config)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        number = config.hydra.job.get("num")  # missing in a single run
        if number is None:
            return
        self.started = time.monotonic()
        self.had_ended = (Path(config.hydra.runtime.output_dir) / SUMMARY).is_file()
        if leads():
            print(self.before_job(number), flush=True)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if job_return.status != JobStatus.COMPLETED:
            return
        self.root = Path(config.hydra.runtime.output_dir).parent
        self.num_done += 1
        if not self.had_ended:
            self.times.append(time.monotonic() - self.started)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if leads() and is_basic(config) and self.num_done > 1:
            root = relpath(self.root)
            if has_odd_letters(root):
                root = quoted(root)
            words = shlex.quote(f"roots=[{root}]")
            print(f"{self.num_done} jobs are done. gcfed-report {words} compares them.", flush=True)

    def before_job(self, number: int) -> str:
        """The line before a job; the first job has the number 0."""
        if self.total is None:
            return f"job {number + 1}"
        line = f"job {number + 1} of {self.total}"
        if not self.times:
            return line
        return f"{line}, {time_left(sum(self.times), len(self.times), self.total - number)}"


def is_basic(config: DictConfig) -> bool:
    """Whether a sweep runs all combinations of its values; not if it searches."""
    return str(config.hydra.sweeper.get("_target_")).endswith(f".{BasicSweeper.__name__}")


def jobs_of_sweep(config: DictConfig) -> int | None:
    """How many jobs a sweep or search has; None for a sweeper that does not say so.

    Args:
        config: the config of the command, whose task overrides still have their lists.
    """
    sweeper = config.hydra.sweeper
    if "n_trials" in sweeper:
        return int(sweeper.n_trials)
    if not is_basic(config):
        return None
    common = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    try:
        overrides = parser.parse_overrides([*common, *config.hydra.overrides.task])
        (jobs,) = BasicSweeper.split_arguments(overrides, None)
    except HydraException:  # the sweeper will say what is wrong
        return None
    return len(jobs)


def check_jobs(configs: Mapping[str, DictConfig], jobs: int) -> None:
    """Raises Refusal if these runs cannot train in processes of their own.

    Args:
        configs: the run's name → its config.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise Refusal(f"jobs={jobs!r} must be a whole number of at least 1.")
    if jobs == 1:
        return
    if launched():
        raise Refusal(f"jobs={jobs} does not combine with torchrun and srun: use jobs=1.")
    for name, cfg in configs.items():
        for key, value in leaves(cfg).items():
            if key.endswith("_target_") and str(value).startswith("__main__."):
                raise Refusal(
                    f"{name}: {key}={value} is defined in the notebook or script itself, where"
                    f" other processes cannot find it: move it to a file, or use jobs=1."
                )


def train_all(configs: Mapping[str, DictConfig], *, jobs: int, quiet: bool) -> None:
    """Trains each config in its folder, ``jobs`` at a time.

    Raises RuntimeError if the process of a run fails. The other processes then end, too.
    """
    progress = Progress(len(configs), quiet)
    if jobs > 1:
        _train_in_processes(configs, progress, jobs)
        return
    from gcfed.run import train

    for name, cfg in configs.items():
        train(cfg, quiet=quiet)
        progress.finished(name)


@dataclass
class _Job:
    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    printed: IO[bytes]

    def explain(self) -> str:
        """The last line of the process, which has failed."""
        self.printed.seek(0)
        lines = self.printed.read().decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else f"exit status {self.process.returncode}"
        failure = self.folder / FAILURE
        where = f" ({failure})" if failure.is_file() else ""
        return f"The run {self.name} has failed: {last}{where}"


def _train_in_processes(configs: Mapping[str, DictConfig], progress: Progress, jobs: int) -> None:
    waiting = list(configs.items())
    running: list[_Job] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name, cfg = waiting.pop(0)
                running.append(_start(name, cfg, jobs))
            ended = [job for job in running if job.process.poll() is not None]
            for job in ended:
                if job.process.returncode:
                    raise RuntimeError(job.explain())
                running.remove(job)
                job.printed.close()
                progress.finished(job.name)
            if not ended:
                time.sleep(WAIT)
    finally:
        for job in running:
            _end(job)


def _start(name: str, cfg: DictConfig, jobs: int) -> _Job:
    """Starts a process with its share of the cores and this process's import paths.

    It is no fork, which would copy a kernel's locks, and does not import the caller's script, which
    would compare again.
    """
    environment = dict(os.environ)
    environment["OMP_NUM_THREADS"] = str(max(1, cores() // jobs))
    environment["PYTHONPATH"] = os.pathsep.join(path or os.curdir for path in sys.path)
    printed = TemporaryFile()  # noqa: SIM115  (the job closes it)
    with TemporaryFile() as given:
        pickle.dump((cfg, True), given)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", TRAIN_FROM_STDIN],
            stdin=given,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    return _Job(name, Path(cfg.paths.output_dir), process, printed)


def _end(job: _Job) -> None:
    """Ends a process. Its run can continue from its last checkpoint."""
    if job.process.poll() is None:
        job.process.terminate()
        try:
            job.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()
    job.printed.close()
