"""Trains the cells of a table and prints them, a paper's beside its numbers.

    gcfed-table                                    lists the package's tables
    gcfed-table my.yaml                            trains your own, then prints it
    gcfed-table gcfed_table5 scale=small           a paper's, at a laptop's size
    gcfed-table … dry_run=true                     what is left to do, and its hours
    gcfed-table … compare=true                     the numbers only
    gcfed-table … 'rows=[FedAvg,gc-*]' 'columns=[…]' 'seeds=[1,2]'
    gcfed-table my.yaml --config-dir conf          with YAML files of your own

All other words are overrides of every run. The command skips finished runs and continues begun
ones. A my.yaml of your own:

    overrides: [data=digits, rounds=30]
    rows: [{label: FedAvg, overrides: [gc=none]}, {label: Mine, overrides: [algorithm=mine]}]
    columns: [{label: α 0.1, overrides: [partition.alpha=0.1]}]
    seeds: [1, 2, 3]
"""

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gcfed.folders.identity import changes_results, key_of
from gcfed.jobs import time_left
from gcfed.tables import running
from gcfed.tables.comparison import write_comparison
from gcfed.tables.gathering import gather
from gcfed.tables.plan import RESERVED_KEYS, Plan, make_plan, measures_of_cells
from gcfed.tables.reading import heading, load, names, reason
from gcfed.tables.records import Selection, Table
from gcfed.tables.running import BEGUN, DONE, NEW, OTHER, Work
from gcfed.tables.search import Tuned, tune
from gcfed.utils.checked import validated
from gcfed.utils.compose import composed, searchpath
from gcfed.utils.near import closest, did_you_mean
from gcfed.utils.refusal import Refusal

FOLDER = "--config-dir"
HELP = ("--help", "-h", "help")
TO_TRAIN = (BEGUN, NEW)
KEYS_OF_COMMAND = ("rows", "columns", "seeds", "scale", "search", "dry_run", "compare")
LENGTH_KEYS = ("rounds", "eval_every")
KEYS_OF_FILE = ("measure", "unit", "overrides", "scales", "title", "note")


@dataclass
class TableRequest:
    """What a command asks for."""

    words: Sequence[str]
    name: str  # of the table, or its file
    scale: str = "full"
    selection: Selection = field(default_factory=Selection)
    dry_run: bool = False
    compare: bool = False
    search_changes: dict[str, Any] = field(default_factory=dict)  # new values of the table's search
    overrides: list[str] = field(default_factory=list)  # of every run
    config_dirs: list[str] = field(default_factory=list)  # the override that names --config-dir

    @property
    def arguments(self) -> list[str]:
        return self.config_dirs + self.overrides

    def changes_of(self, table: Table) -> list[str]:
        """The overrides of the scale and the command that make other runs than the whole table."""
        words = list(self.overrides)
        if self.scale != "full":
            words = table.scales[self.scale].overrides + words
        return [
            word for word in words if changes_results(key_of(word)) or key_of(word) in LENGTH_KEYS
        ]


def request_of(words: Sequence[str]) -> TableRequest:
    """Raises Refusal for a word that the command cannot read."""
    name, *rest = words
    if name.startswith("-") or "=" in name:
        raise Refusal(f"{name}: the table comes first, as in gcfed-table my.yaml dry_run=true.")
    asked = TableRequest(words, name)
    selection: dict[str, Any] = {}
    waiting = iter(rest)
    for word in waiting:
        key, equals, text = word.partition("=")
        if key == FOLDER:
            folder = text if equals else next(waiting, "")
            asked.config_dirs = [searchpath(folder, rest)]
        elif word.startswith("--"):
            raise Refusal(f"{word}: write key=value without dashes, such as dry_run=true.")
        elif not equals and not word.startswith("~"):
            raise Refusal(f"{word}: write key=value, such as scale=small or rounds=10.")
        elif key in ("rows", "columns", "seeds"):
            selection[key] = _value(word)
        elif key == "search" or key.startswith("search."):
            asked.search_changes[key] = _value(word)
        elif key == "scale":
            asked.scale = text
        elif key in KEYS_OF_FILE:
            raise Refusal(f"{word}: {key} is a key of the table: set it in its YAML file.")
        elif key in ("dry_run", "compare"):
            setattr(asked, key, validated(key, _value(word), bool))
        else:
            near_keys = closest(key, KEYS_OF_COMMAND)  # dryrun=true, which a run would not know
            if near_keys and key not in RESERVED_KEYS:
                raise Refusal(f"{word}{did_you_mean(near_keys)}")
            asked.overrides.append(word)
    try:
        asked.selection = Selection(**selection)
    except ValueError as error:
        (first,) = error.errors()[:1]  # type: ignore[attr-defined]  # pydantic's
        raise Refusal(f"{reason(first)}.") from None
    return asked


def _value(word: str) -> Any:
    """Raises Refusal if there is none: ``seeds=`` would mean all seeds, and ``search=`` none."""
    key, _, text = word.partition("=")
    if not text:
        raise Refusal(f"{word} has no value.")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise Refusal(f"{word}: the value of {key} is no YAML.") from None


@dataclass
class State:
    """The works of a table, and what is known of the jobs without one."""

    title: str
    found: Mapping[str, Work]  # by the folder of a job
    without_run: Counter[str]
    tuned: Tuned  # what the searches found

    @property
    def works(self) -> list[Work]:
        """Each work once."""
        return [*{id(work): work for work in self.found.values()}.values()]

    @property
    def left(self) -> list[Work]:
        return [work for work in self.works if work.state in TO_TRAIN]

    def lines(self) -> list[str]:
        """What is done and what is left."""
        number = Counter(work.state for work in self.works)
        counts = [f"{number[state]} {state}" for state in (DONE, BEGUN, NEW)]
        lines = [self.title, f"  {', '.join(counts)}"]
        lines += [f"  left out: {count} cells, {why}" for why, count in self.without_run.items()]
        lines += [f"  {OTHER}: {title}: {why}" for title, why in self.tuned.lost.items()]
        for work in self.works:
            if work.state == OTHER:
                lines.append(
                    f"  {OTHER}: {work.job.title}: {work.folder} holds another run: {work.why}."
                    " Move it away."
                )
        return lines

    def lines_of_jobs(self) -> list[str]:
        """Each job with its state, and an estimate of the hours that are left."""
        from gcfed.tables.cost import estimate  # torch

        lines = []
        for work in self.works:
            lines.append(f"  {work.state:<13} {work.job.title}  ({work.folder.name})")
        if self.tuned.left:
            lines.append(f"  to start      {len(self.tuned.left)} runs of searches before them")
        left = [(work.cfg, work.cfg.rounds - work.rounds) for work in self.left]
        return [*lines, f"  {estimate([*self.tuned.left, *left])}"]

    def unfinished(self) -> list[str]:
        """Each job that is not finished, with the reason."""
        lines = [f"  {title}: {why}" for title, why in self.tuned.lost.items()]
        for work in self.works:
            if work.state != DONE:
                lines.append(f"  {work.job.title}: {work.why or work.state}\n    {work.folder}")
        return lines


def main(words: Sequence[str]) -> int:
    """Returns the exit code, which is 1 if a job is not finished."""
    if not words:
        _print([f"{name:<20} {heading(name)}" for name in names()])
        return 0
    if words[0] in HELP:
        print(__doc__)
        return 0
    request = request_of(words)
    table = load(request.name, request.search_changes)
    planned = make_plan(table, request.scale, request.selection, request.arguments)
    logs = _logs(planned, request)
    root = logs / "study" / table.name / request.scale
    if not request.compare:
        works = [running.composed_work(job, root) for job in planned.first_jobs]
        running.check_cells(works, measures_of_cells(table, planned))
    state = _state(table, request, planned, root, logs)
    _print(state.lines())
    if request.dry_run:
        _print(state.lines_of_jobs())
        return 0
    if not request.compare:
        _train(state.left, root)
    _print([_comparison(table, request, planned, state, root)])
    unfinished = state.unfinished()
    if not unfinished or request.compare:
        return 0
    number = len(state.works) + len(state.tuned.lost)
    _print(
        [
            f"Not finished, {len(unfinished)} of {number} jobs:",
            *unfinished,
            "The same command tries them again. To start one anew, move its folder away.",
        ]
    )
    return 1


def _print(lines: Sequence[str]) -> None:
    print(*lines, sep="\n", flush=True)


def _logs(planned: Plan, request: TableRequest) -> Path:
    """The folder of all runs."""
    if planned.first_jobs:
        cfg = running.composed_work(planned.first_jobs[0], Path()).cfg
    else:
        cfg = composed(request.arguments)
    return Path(cfg.paths.log_dir).absolute()


def _state(table: Table, request: TableRequest, planned: Plan, root: Path, logs: Path) -> State:
    """Searches the cells if the table asks for it, and looks up the runs of the jobs."""
    tuned = Tuned(jobs=planned.jobs)
    if table.search:
        jobs = planned.jobs
        tuned = tune(table.search, jobs, root, dry_run=request.dry_run, train=not request.compare)
    works = running.look_up(tuned.jobs, root, logs)
    for work in works.values():
        # a run that is there does not have the settings that the search will choose
        if work.job.cell in tuned.open_cells:
            work.state = NEW
            work.rounds = 0
    number = len({id(work) for work in works.values()})
    title = f"{table.name}, scale {request.scale}: {number} jobs in {root}"
    return State(title, works, planned.without_run, tuned)


def _train(left: Sequence[Work], root: Path) -> None:
    started = time.monotonic()
    for done, work in enumerate(left):
        number = f"{done + 1} of {len(left)}"
        if done:
            number += f", {time_left(time.monotonic() - started, done, len(left) - done)}"
        running.run(work, number, root)


def _comparison(
    table: Table, request: TableRequest, planned: Plan, state: State, root: Path
) -> str:
    if not state.found:
        return "There is nothing to compare."
    works = {}
    for cell, folders in planned.folders.items():
        works[cell] = [state.found[name] for name in folders if name in state.found]
    command = f"gcfed-table {shlex.join(request.words)}"
    cells = gather(table, works)
    changes = request.changes_of(table)
    chosen = _chosen(planned, state.tuned)
    return write_comparison(table, request.scale, cells, root, command, changes, chosen)


def _chosen(planned: Plan, tuned: Tuned) -> str:
    """The settings that the searches chose for the cells, as a note; "" without a search."""
    cells = []
    for (row, column), folders in planned.folders.items():
        cell = planned.jobs[folders[0]].cell
        if cell in tuned.best:
            words = " ".join(map(_rounded, tuned.best[cell]))
            cells.append(f"{row}, {column}: {words}{tuned.failed[cell]}")
    return f"The search chose {'; '.join(cells)}." if cells else ""


def _rounded(word: str) -> str:
    """An override; a number in it has three digits."""
    key, _, value = word.partition("=")
    try:
        return f"{key}={float(value):.3g}"
    except ValueError:
        return word
