"""From a study's YAML to its jobs, rows × columns × seeds, each with a folder of its own; and jobs to the launcher."""

import logging
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher

from gcfed.runs.folder import CHECKPOINT
from gcfed.runs.identity import counted, digest, key_of
from gcfed.study.papers import PaperTable, choose, load, slug, table_of
from gcfed.utils.checked import SettingError, Whole, checked, fits

Labels = list[str | float] | None
Seeds = list[Whole] | None
REFUSED = {
    "study.overrides": "say the overrides by themselves, as key=value; they go to every job",
    "seed": "a study has seeds of its own; say study.seeds=[1,2,3]",
    "ckpt_path": "a study finds the checkpoints of its jobs itself; leave it out",
}


class Job(NamedTuple):
    """One run of a study: its name for people, what Hydra composes it from, and the name of its folder."""

    title: str
    overrides: list[str]
    folder: str
    cell: str = ""  # the part of the folder's name that its seeds share


def different(name: str, values: list[Any] | None) -> None:
    """Refuses an empty list, and one that has something twice; null passes."""
    if values is not None and len({*map(str, values)}) != max(1, len(values)):
        raise SettingError(name, f"={values} must be a list of different ones, such as [1,2,3], or null.")


@checked
@dataclass(frozen=True)
class Choice:
    """Which part of its table a study runs; null: what its scale says, or all."""

    rows: Labels = None  # by label or short name, where * stands for anything
    columns: Labels = None
    seeds: Seeds = None
    overrides: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "seeds"):
            different(name, getattr(self, name))


@checked
@dataclass(frozen=True)
class Study(Choice):
    """The ``study`` of a config: a table, what of it is run, and at which ``scale`` less."""

    table: Any = None
    scales: dict | None = None
    search: dict | None = None
    dry_run: bool = False


def settings_of(where: str, kind: Callable[..., Any], node: Any) -> Any:
    """A group of settings as the dataclass that checks it; or ValueError, which names a setting below ``where``."""
    if not isinstance(node, Mapping):
        raise ValueError(f"{where}={node} must be a group of settings.")
    try:
        return kind(**{str(key): value for key, value in node.items()})
    except SettingError as error:
        raise ValueError(f"{where}.{error}") from None


def read_jobs(scale: str, node: Mapping[str, Any], arguments: Iterable[str] = ()) -> tuple[list[Job], Counter[str]]:
    """The jobs of a study, seed by seed; and why how many cells have none.

    Raises:
        ValueError: an unknown key, scale, row or column, or an override that a study cannot take.
        FileNotFoundError: there is no such table.
    """
    study: Study = settings_of("study", Study, node)
    scales = {"full": {}} | (study.scales or {})
    part: Choice = settings_of(f"study.scales.{scale}", Choice, scales[fits("scale", scale, Literal[tuple(scales)])])
    table = read_table(study.table)
    rows = choose("rows", study.rows or part.rows, [row.label for row in table.rows])
    columns = choose("columns", study.columns or part.columns, [column.label for column in table.columns])
    common, extra = [*(study.overrides or ()), *(part.overrides or ())], check(arguments)
    text = re.sub(r"[^\w.,=~\[\]-]+", "-", "".join(f",{override.lstrip('+')}" for override in counted(extra)))
    suffix = text if len(text) <= 120 else f"{text[:107]}-{digest({'': text})}"  # file systems end a name at 255 bytes
    cells = {cell: table.gap(*cell) for cell in product(table.rows, table.columns)}
    names: dict[frozenset[str], str] = {}  # cells of equal overrides are one run, which the first of them names
    for row, column in (cell for cell, gap in cells.items() if not gap):
        names.setdefault(effect(table.command_overrides(row, column) or ()), f"{slug(row.label)}_{slug(column.label)}")
    chosen = {cell: gap for cell, gap in cells.items() if cell[0].label in rows and cell[1].label in columns}
    jobs: dict[str, Job] = {}
    for seed in study.seeds or part.seeds or range(1, (table.seeds or 1) + 1):
        for row, column in (cell for cell, gap in chosen.items() if not gap):
            own = table.command_overrides(row, column) or ()
            cell = names[effect(own)]
            folder, overrides = f"{cell}_s{seed}{suffix}", [*own, *common, f"seed={seed}", *extra]
            title = f"{row.label}, {column.label}, seed {seed}"
            jobs.setdefault(folder, Job(title, overrides, folder, f"{cell}{suffix}"))
    return list(jobs.values()), Counter(filter(None, chosen.values()))


def read_table(table: str | Mapping[str, Any] | None) -> PaperTable:
    """A table by its name in ``configs/paper``, or a study's own: rows and columns (label, overrides) and overrides."""
    if table is None or table == "":
        raise ValueError("study.table is not set: name a table of configs/paper, or write rows and columns.")
    try:
        return load(table) if isinstance(table, str) else table_of({**table, "name": "study.table"})
    except FileNotFoundError as error:
        raise FileNotFoundError(f"study.table={table}: {error}") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"study.table needs rows and columns, lists of {{label, overrides}}: {error}") from None


def effect(overrides: Iterable[str]) -> frozenset[str]:
    """The last word on each key."""
    return frozenset({key_of(override): override for override in overrides}.values())


def check(arguments: Iterable[str]) -> list[str]:
    """The command line's overrides that go to every job; ``ckpt_path=last`` asks for what a study does anyway."""
    extra = [argument for argument in arguments if argument != "ckpt_path=last"]
    for override in OverridesParser.create().parse_overrides(extra):
        why = REFUSED.get(override.key_or_group)
        if override.is_sweep_override():
            why = "a study sweeps over its rows, columns and seeds only; give one value, or write a study of your own"
        if why:
            raise ValueError(f"{override.input_line}: {why}.")
    return [override for override in extra if key_of(override).split(".")[0] not in ("study", "scale")]


def is_in_process(launcher: Launcher) -> bool:
    """Whether this is Hydra's own launcher, which runs jobs one after the other in this process."""
    return type(launcher).__name__ == "BasicLauncher"


def launch(launcher: Launcher, jobs: Sequence[tuple[Sequence[str], Path]], first: int) -> list[str]:
    """Runs jobs, each by its overrides in its folder, from the checkpoint there if there is one.

    Returns the error of each job that failed, else ""; ``first`` is the number of the first job. It raises ValueError
    if the launcher itself failed, and not in this process.
    """
    calls = []
    for overrides, folder in jobs:
        place = {"hydra.sweep.dir": folder.parent, "hydra.sweep.subdir": folder.name}
        if (folder / CHECKPOINT).is_file():
            place["ckpt_path"] = folder / CHECKPOINT
        quoted = {key: QuotedString(str(path), Quote.single).with_quotes() for key, path in place.items()}
        calls.append([*overrides, *(f"{key}={path}" for key, path in quoted.items())])
    # It announces "Launching 1 jobs locally" for each; who calls has said more.
    logging.getLogger("hydra._internal.core_plugins.basic_launcher").setLevel(logging.WARNING)
    try:
        returns = launcher.launch(calls, initial_job_idx=first)
    except Exception as error:
        if is_in_process(launcher):
            return [_reason(error)] * len(calls)
        hint = "Jobs that it started may still be running: look before you give the same command again."
        raise ValueError(f"the launcher failed, {_reason(error)}. {hint}") from None
    return [_reason(r._return_value) if r.status == JobStatus.FAILED else "" for r in returns]


def _reason(error: BaseException) -> str:
    """The error in one line. Its frames let go of what they hold: a failed job's model, data and GPU memory."""
    chain = [error]  # may be a ring
    for one in chain:
        traceback.clear_frames(one.__traceback__)
        chain += [other for other in (one.__cause__, one.__context__) if other and other not in chain]
    sentence = " ".join(str(error).split())
    return sentence if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {sentence}"
