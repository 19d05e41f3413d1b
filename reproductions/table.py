"""Trains the cells of a table and prints them beside the paper's numbers: python
reproductions/table.py gcfed_table5

Without arguments it lists the tables. ``scale=small``, ``rows=[FedAvg,gc-*]``, ``columns=[…]`` and
``seeds=[1,2]`` choose a part. ``dry_run=true`` prints what is left to do, and ``compare=true`` only
prints the numbers. All other arguments are overrides of every run. The command skips finished runs
and continues begun ones.
"""

import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from gcfed.folders.folder import CHECKPOINT, SUMMARY, Run, find_runs, read_run  # noqa: E402
from gcfed.folders.identity import differences, digest, leaves  # noqa: E402
from gcfed.folders.lock import locked  # noqa: E402
from gcfed.utils.compose import composed  # noqa: E402
from reproductions.compare import Whole, write_comparison  # noqa: E402
from reproductions.tables import CONFIGS, Axis, Job, Part, Table, load, plan  # noqa: E402

STOP = "callbacks.early_stopping"
FINISHED, BEGUN, NEW, OTHER = "finished", "to continue", "to start", "not to be run"


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

    def look(self) -> None:
        """Reads the folder again."""
        self.state, self.rounds, self.why = NEW, 0, ""
        begun, asked = (self.folder / CHECKPOINT).is_file(), self.cfg.rounds
        if not begun and not (self.folder / SUMMARY).is_file():
            return
        run = read_run(self.folder)
        self.rounds, self.why = run.rounds, self.lack(run)
        stopped = (
            "stopped" in run.summary and run.planned == asked and OmegaConf.select(self.cfg, STOP)
        )
        if not self.why and run.has_ended and (run.rounds == asked or stopped):
            self.state = FINISHED
        elif not self.why and begun and 0 < run.rounds <= asked:
            self.state = BEGUN
        else:
            rounds = f"{run.rounds} rounds are done there, {asked} are asked for"
            self.state, self.why = (
                OTHER,
                self.why or rounds + ", and there is no checkpoint" * (not begun),
            )

    def lack(self, run: Run) -> str:
        """Why a run is not the job's: another identity, other tests, fewer measurements; "" if it
        is the job's.
        """
        if odd := differences(run.leaves, self.leaves) if run.config else run.note:
            return odd
        there, here = (
            min(n, self.cfg.rounds) for n in (run.get("eval_every") or 1, self.cfg.eval_every)
        )
        if there != here:  # the last round is always tested
            return f"eval_every is {there} there, {here} here"
        for name, asked in self.beside.items():
            if not (has := run.get(name)):
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
    def beside(self) -> dict[str, Any]:
        """Its metrics and its early stopping, by dotted key: they are not part of its identity."""
        nodes = {f"metrics.{name}": node for name, node in (self.cfg.metrics or {}).items()}
        nodes[STOP] = OmegaConf.select(self.cfg, STOP)
        return {name: OmegaConf.to_container(node) for name, node in nodes.items() if node}


def train(overrides: Sequence[str], folder: Path) -> str:
    """Runs the command that a user types, from the folder's checkpoint if it has one.

    Returns why it failed, or "".
    """
    command = [sys.executable, str(ROOT / "src/train.py"), *overrides, f"hydra.run.dir='{folder}'"]
    command += [f"ckpt_path='{folder / CHECKPOINT}'"] * (folder / CHECKPOINT).is_file()
    if not (code := subprocess.run(command).returncode):
        return ""
    return (
        read_run(folder).note if folder.is_dir() else ""
    ) or f"it ended with code {code}; see above"


def look_up(jobs: Mapping[str, Job], root: Path, logs: Path) -> dict[str, Work]:
    """Works by the folders of the jobs.

    Equal jobs are one run. A finished run anywhere below ``logs`` counts.
    """
    runs = [run for run in find_runs([logs]) if run.has_ended] if logs.is_dir() else []
    works, found = dict[Any, Work](), dict[str, Work]()
    for job in jobs.values():
        try:
            cfg = composed(job.overrides)
            work = Work(job, cfg, leaves(cfg), root / job.folder)
        except (ValueError, OmegaConfBaseException) as error:
            raise ValueError(f"{job.title}: {' '.join(str(error).split())}") from None
        key = digest(work.leaves), cfg.rounds
        found[job.folder] = works.setdefault((*key, cfg.eval_every, str(work.beside)), work)
        if found[job.folder] is work:
            work.look()
            twins = [
                run for run in runs if (run.identity, run.rounds) == key and not work.lack(run)
            ]
            if twins and work.state != FINISHED:
                work.folder, work.state, work.why = twins[0].folder, FINISHED, ""
    return found


def whole_table(table: Table, scale: str, extra: Sequence[str]) -> Whole:
    """A function that gives the values of a cell's run in the whole table, by dotted key.

    It gives {} where the scale and the arguments change nothing.
    """
    full = table.scales.get("full", Part()).overrides

    @cache
    def values(*overrides: str) -> Mapping[str, Any]:
        cfg = composed(overrides)
        return {**leaves(cfg), "rounds": cfg.rounds, "eval_every": cfg.eval_every}

    def of(row: Axis, column: Axis) -> Mapping[str, Any]:
        if scale == "full" and not extra:
            return {}
        return values(*(table.overrides_of(row, column) or ()), *full)

    return of


def run(work: Work, number: str, root: Path) -> None:
    """Runs a job, unless another process is running it or has finished it."""
    with locked(root / ".locks" / work.job.folder) as holder:
        work.look()
        if holder or work.state not in (BEGUN, NEW):
            why = f"{holder} is running it" if holder else work.why or "it is finished by now"
            print(f"skipped: {work.job.title}; {why}", flush=True)
        else:
            print(f"job {number}: {work.job.title}\n  {work.folder}", flush=True)
            why = train(work.job.overrides, work.folder)
            work.look()
    work.why = work.why or why


def main(words: Sequence[str]) -> int:
    """Returns the exit code, which is 1 if a job is not finished."""
    if not words:
        heads = {
            path.stem: path.read_text().partition("\n")[0][2:]
            for path in sorted(CONFIGS.glob("*.yaml"))
        }
        print(*(f"{name:<20} {head}" for name, head in heads.items()), sep="\n")
        return 0
    keys = {word: word.partition("=")[0] for word in words[1:]}
    own = {"scale", "rows", "columns", "seeds", "dry_run", "compare", "search"}
    said = {
        key: yaml.safe_load(word.partition("=")[2])
        for word, key in keys.items()
        if key.split(".")[0] in own
    }
    extra = [word for word, key in keys.items() if key not in said]
    table = load(words[0], {key: said.pop(key) for key in [*said] if key.startswith("search")})
    scale, dry_run, compare = (
        said.pop("scale", "full"),
        said.pop("dry_run", False),
        said.pop("compare", False),
    )
    jobs, places, gaps = plan(table, scale, Part(**said), extra)
    lost, trials = dict[str, str](), list[tuple[DictConfig, int]]()
    logs = Path(
        composed(next((job.overrides for job in jobs.values()), [])).paths.log_dir
    ).absolute()
    root = logs / "study" / table.name / scale
    if table.search:
        from reproductions.search import tune  # Optuna, an extra

        jobs, lost, trials = tune(table.search, jobs, root, composed, train, dry_run or compare)
    works = look_up(jobs, root, logs)
    each = list({id(work): work for work in works.values()}.values())
    number = Counter(work.state for work in each)
    lines = [f"{table.name}, scale {scale}: {len(each)} jobs in {root}"]
    lines += [f"  {', '.join(f'{number[state]} {state}' for state in (FINISHED, BEGUN, NEW))}"]
    lines += [f"  left out: {count} cells, {why}" for why, count in gaps.items()]
    lines += [f"  not to be run: {title}: {why}" for title, why in lost.items()]
    odd = [
        f"{w.job.title}: {w.folder} holds another run: {w.why}. Move it away."
        for w in each
        if w.state == OTHER
    ]
    lines += [f"  not to be run: {text}" for text in odd]
    left = [work for work in each if work.state in (BEGUN, NEW)]
    if dry_run:
        from reproductions.cost import estimate  # torch

        lines += [f"  {work.state:<13} {work.job.title}  ({work.folder.name})" for work in each]
        remaining = [(work.cfg, work.cfg.rounds - work.rounds) for work in left]
        lines.append(f"  {estimate([*trials, *remaining])}")
    print(*lines, sep="\n", flush=True)
    if dry_run:
        return 0
    for i, work in enumerate([] if compare else left, start=1):
        run(work, f"{i} of {len(left)}", root)
    found = {
        place: [works[name] for name in folders if name in works]
        for place, folders in places.items()
    }
    command = f"python reproductions/table.py {shlex.join(words)}"
    if works:
        print(
            write_comparison(table, scale, found, root, command, whole_table(table, scale, extra))
        )
    else:
        print("There is nothing to compare.")
    unfinished = [f"  {title}: {why}" for title, why in lost.items()]
    unfinished += [
        f"  {w.job.title}: {w.why or w.state}\n    {w.folder}" for w in each if w.state != FINISHED
    ]
    if not unfinished or compare:
        return 0
    unfinished.append("The same command tries them again. To start one anew, move its folder away.")
    print(
        f"{len(unfinished) - 1} of {len(each) + len(lost)} jobs are not finished:",
        *unfinished,
        sep="\n",
    )
    return 1


if __name__ == "__main__":
    # so that it ends the run that it started, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as problem:
        sys.exit(str(problem))
