"""``gcfed.configure``, ``gcfed.compare`` and ``gcfed.runs``: configs, comparisons and finished runs
from Python.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf, open_dict

from gcfed.folders.folder import (
    CHECKPOINT,
    DIVERGED,
    METRICS,
    Run,
    find_runs,
    mixed_versions,
    read_run,
)
from gcfed.folders.measures import measure_of, measure_of_last, parse, smooth, value
from gcfed.folders.place import check_folder
from gcfed.folders.reading import read_metrics
from gcfed.folders.run_columns import require_measured
from gcfed.jobs import check_jobs, train_all
from gcfed.utils.compose import composed, searchpath, shorthand
from gcfed.utils.machine import launch_folder
from gcfed.utils.near import near
from gcfed.utils.refusal import Refusal
from gcfed.utils.resolvers import LOGS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from gcfed.reporting.decision import Decision

log = logging.getLogger(__name__)
_composing = threading.Lock()  # Hydra composes one config at a time
NOW = "%Y-%m-%d_%H-%M-%S-%f"
Name = str | int | float  # of a method
#: Two overrides in one text.
SEVERAL = re.compile(r"[\w./@+~-]+=(?P<value>[^'\"\[{(]*\s[+~]*[\w./@]+=.*)")
#: The measures of :func:`runs`.
USUAL_MEASURES = ("final:test/acc", "last10:test/acc", "final:test/loss", "total:comm/up_bytes")


def configure(
    *overrides: str | Iterable[str],
    folder: str | Path | None = None,
    config_dir: str | Path | None = None,
) -> DictConfig:
    """The config of a run: what ``python src/train.py`` composes of these overrides.

    The run draws no progress bar. Unless ``trainer.devices`` is set, it has one process: forks copy
    a kernel's locks.

    Args:
        overrides: as on the command line, ``"client.epochs=1"``; one by one, or in a list.
        folder: the run's. None: a new one below ``paths.log_dir`` each time the config trains; with
            ``ckpt_path=last`` the folder of the newest run with these settings.
        config_dir: the folder of your own YAML files, as ``--config-dir`` of the commands. A group
            is a folder in it: ``conf/algorithm/mine.yaml`` is ``algorithm=mine``.

    Raises Refusal for an unknown key or option, and suggests the right one; FileNotFoundError
    for a missing ``config_dir``; TypeError if an override is no text.
    """
    given = _words(overrides)
    words = shorthand(given)
    searched = words
    if config_dir is not None:
        searched = [searchpath(config_dir, words), *words]
    with _composing:
        cfg = composed(searched)
    if folder is None and OmegaConf.is_interpolation(cfg.paths, "output_dir"):
        changed = ",".join(word for word in words if not word.startswith(("ckpt_path=", "paths.")))
        changed = re.sub(r"['\"\\$]+", "-", changed)  # the resolver's argument is in quotes
        base = "${paths.log_dir}/${name},${ckpt_path}"
        # with_folder makes it each run's own
        folder = f"${{run_dir:{base},'{datetime.now():{NOW}}','{changed}'}}"
    with open_dict(cfg):
        if folder is not None:
            cfg.paths.output_dir = str(folder)
        cfg.callbacks.progress = None
        if cfg.trainer.devices == "auto":
            cfg.trainer.devices = 1
    return cfg


def _words(overrides: Iterable[str | Iterable[str]]) -> list[str]:
    """The overrides one by one.

    Raises TypeError if one is no text, and Refusal if one holds several.
    """
    words: list[str] = []
    for given in overrides:
        if not isinstance(given, Iterable):
            raise TypeError(f"{given!r} is no override: write a text such as 'rounds=3'.")
        if isinstance(given, Mapping):
            parts = ", ".join(repr(f"{key}={value}") for key, value in given.items())
            raise TypeError(f"overrides are texts, not a dict: write configure({parts}).")
        words += [given] if isinstance(given, str) else given
    for word in words:
        if not isinstance(word, str):
            raise TypeError(f"{word!r} is no override: write a text such as 'rounds=3'.")
        several = SEVERAL.fullmatch(word)
        if several and not os.path.exists(several["value"]):  # noqa: PTH110  (a value may be long)
            parts = ", ".join(repr(part) for part in word.split())
            raise Refusal(f"{word}: an argument holds one override: write configure({parts}).")
    return words


def compare(
    configs: Mapping[Name, DictConfig | str | Iterable[str]],
    seeds: Iterable[int] = (1, 2, 3),
    folder: str | Path | None = None,
    *,
    jobs: int = 1,
    quiet: bool = False,
) -> Comparison:
    """Trains each config with each seed. After each run, a line says how long the rest takes.

    Equal seeds have equal clients, cohorts and weights.

    Args:
        configs: the method's name, a text or a number → its config, of :func:`configure`, or its
            overrides.
        seeds: replace the configs' own.
        folder: gets the runs' folders, ``<method>_seed<seed>``. A run that exists is continued if
            its config says ``ckpt_path=last``, else refused. None: a new folder in
            ``logs/compare/``.
        jobs: the number of runs at a time, each in a process with its share of the cores.
        quiet: as in :func:`gcfed.train`.

    Raises Refusal before any run if names or seeds are missing or equal, a setting cannot work
    or a folder is taken; TypeError if a config or the seeds are none. Raises RuntimeError if the
    process of a run fails; ``ckpt_path=last`` continues the comparison.
    """
    import pandas as pd

    from gcfed.assemble import check_buildable  # torch

    if not isinstance(configs, Mapping):
        raise TypeError('compare takes a dict: {"FedAvg": gcfed.configure("gc=none"), …}.')
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise TypeError(f"compare: seeds={seeds!r} is no list of seeds: write seeds=(1, 2, 3).")
    seeds = [*seeds]
    names = _folder_names(configs, seeds)
    composed_configs = {method: _config(method, given) for method, given in configs.items()}
    logs = next(iter(composed_configs.values())).paths.log_dir
    if not folder:
        folder = Path(logs, "compare", launch_folder() or f"{datetime.now():{NOW}}")
    root = Path(folder).expanduser().absolute()
    folders = {
        (method, seed): root / f"{names[method]}_seed{seed}" for seed in seeds for method in names
    }
    runs = {}
    for (method, seed), path in folders.items():
        runs[f"{method}, seed {seed}"] = _seeded(composed_configs[method], seed, path)
    check_jobs(runs, jobs)
    for run, path in zip(runs.values(), folders.values(), strict=True):
        check_buildable(run)
        check_folder(run, path)
    train_all(runs, jobs=jobs, quiet=quiet)
    mixed = mixed_versions(map(read_run, folders.values()))  # of runs that were continued
    if mixed:
        log.warning("compare: %s.", mixed)
    frames = {key: read_metrics(folders[key] / METRICS) for key in folders}
    return Comparison(pd.concat(frames, names=["method", "seed", "round"]), folders)


def _folder_names(methods: Iterable[Name], seeds: Sequence[int]) -> dict[Name, str]:
    """The beginning of the name of each method's folders."""
    names = {}
    for method in methods:
        if not isinstance(method, str | int | float):
            raise TypeError(f"compare: the name {method!r} must be a text or a number.")
        names[method] = re.sub(r"[^\w.+-]+", "-", str(method)).strip("-.") or "run"
    are_different = len({*names.values()}) == len(names) and len({*seeds}) == len(seeds)
    if not (names and seeds and are_different):
        raise Refusal(
            "A comparison needs different names and different seeds:"
            f" {', '.join(map(str, names))}; {seeds}."
        )
    return names


def _config(method: Name, given: DictConfig | str | Iterable[str]) -> DictConfig:
    if isinstance(given, DictConfig):
        return given
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise TypeError(
            f"compare: {method!r} is {given!r}, which is no config: write"
            f" {{{method!r}: gcfed.configure(…)}} or a list of overrides."
        )
    return configure(given)


def _seeded(cfg: DictConfig, seed: int, folder: Path) -> DictConfig:
    """A copy of the config for one seed. It continues the run that the folder holds, if the config
    asks for that.
    """
    if cfg.ckpt_path not in (None, "last"):
        raise Refusal(
            f"ckpt_path={cfg.ckpt_path}: a comparison continues its own folders, by ckpt_path=last."
        )
    run = deepcopy(cfg)
    with open_dict(run):
        run.seed = seed
        run.paths.output_dir = str(folder)
        if not (folder / CHECKPOINT).is_file():
            run.ckpt_path = None
    return run


def runs(*roots: str | Path, measures: str | Iterable[str] = USUAL_MEASURES) -> pd.DataFrame:
    """A row for each run below the roots, also for those that have not ended. The log names the
    folders that are left out because their files cannot be read.

    Columns: ``folder``; ``place`` (data, model, clients, rounds) and ``method``, as in the report;
    ``seed``; ``state`` (finished, diverged, failed, interrupted or unfinished) and its ``reason``;
    ``repeated``, True if a later run of the same settings and seed counts instead; ``rounds``, the
    number of finished rounds; each dotted key in which the runs differ; each measure, NaN if the
    run has no value. Accuracies are shares from 0 to 1.

    Args:
        roots: folders with runs; by default ``logs``.
        measures: such as ``last10:test/acc`` and ``rounds:0.8`` (:mod:`gcfed.folders.measures`).

    Raises FileNotFoundError for a root that does not exist; Refusal for a measure that no run
    has.
    """
    import pandas as pd

    from gcfed.reporting.frame import RUN_COLUMNS, frame_of

    asked = [measures] if isinstance(measures, str) else [*measures]
    for measure in asked:
        parse(measure, "measures")
    found = find_runs(roots or [LOGS])
    for run in found:
        if not run.config:
            log.warning("Left out: %s: %s", run.folder, run.reason)
    table = frame_of(found)
    found_runs = table["run"]
    if measures is not USUAL_MEASURES:
        require_measured(asked, found_runs, "measures")
    frame = table[["place", "method", "seed", "state"]].copy()
    frame.insert(0, "folder", [str(run.folder) for run in found_runs])
    frame["reason"] = [run.reason for run in found_runs]
    frame["repeated"] = table["repeated"]
    frame["rounds"] = [run.rounds for run in found_runs]
    for key in table.columns.difference([*RUN_COLUMNS, *frame], sort=False):
        frame[key] = [run.leaves.get(key) for run in found_runs]
    for measure in asked:
        frame[measure] = pd.Series(
            [value(run, measure) for run in found_runs], table.index, dtype=float
        )
    return frame


@dataclass(repr=False)
class Comparison:
    """Runs of several methods with several seeds."""

    frame: pd.DataFrame  # (method, seed, round) → the columns of metrics.csv
    folders: dict[tuple[Name, int], Path]  # (method, seed) → the run's

    def __repr__(self) -> str:
        seeds = list(dict.fromkeys(seed for _, seed in self.folders))
        rounds = self.frame.index.get_level_values("round").max()
        return f"Comparison(methods={self._methods}, seeds={seeds}, rounds={rounds})"

    def curves(
        self, column: str, methods: Iterable[Name] | None = None
    ) -> dict[Name, pd.DataFrame]:
        """A column of each method: [rounds with a value, seeds].

        Raises Refusal, with near names, if no run has the column, or if a method has no value.
        """
        if column not in self.frame:
            raise Refusal(f"column={column}: no run here has it{near(column, self.frame)}")
        values = self.frame[column].dropna()
        methods = self._methods if methods is None else [*methods]
        measured = values.index.unique("method")
        for method in methods:
            if method not in measured:
                raise Refusal(f"column={column}: {method} has no value in it.")
        return {method: values.loc[method].unstack("seed") for method in methods}

    def table(
        self, column: str | None = None, rounds: int | None = None, baseline: Name | None = None
    ) -> pd.DataFrame:
        """A row for each method: a column's mean over seeds and the last ``rounds`` rounds, with
        its 95 % interval from ``low`` to ``high``, and the number of ``seeds``.

        The name of the columns is the measure with its unit, ``last10:test/acc (%)``. Numbers have
        the digits and the unit of the report; ``frame`` has all digits. Narrow enough for a
        terminal of 80 letters: ``pairs`` and ``diverged`` are there only if they say something.

        Args:
            column: None: the column that the methods declare as their result. A method that cannot
                be compared with the others is left out, and the log says why.
            rounds: None: as in the report. That is ten for an accuracy if each run has at least
                thirty rounds, else the last value alone.
            baseline: a method. Adds the mean ``difference`` to it, seed by seed, and its 95 %
                interval, ``from`` and ``to``, without a correction for several differences.
                Accuracies differ by points. ``pairs``, if it is another number than ``seeds``,
                counts the seeds with a difference.

        ``diverged`` counts the diverged runs of each method, if a run diverged. They count like
        the others.

        Raises Refusal for an unknown column or baseline, and for less than one round.
        """
        import pandas as pd

        from gcfed.reporting.verdict import compare_methods, scale_of
        from gcfed.utils.checked import Count, validated

        validated("rounds", rounds, Count | None)
        decision, methods = self._basis(column)
        usual = parse(decision.measure)
        column = usual.column
        curves = self.curves(column, methods)
        rounds = rounds or usual.window or 1
        numbers_of = {}  # by method, then by seed
        for method, runs in curves.items():
            numbers_of[method] = runs.apply(lambda run: smooth(run.dropna(), rounds).iloc[-1])
        if baseline is not None and baseline not in numbers_of:
            why = decision.not_compared.get(
                str(baseline), f"there are {', '.join(map(str, numbers_of))}"
            )
            raise Refusal(f"baseline={baseline}: {why}.")
        values = pd.DataFrame(numbers_of)
        measure = measure_of_last(column, rounds)
        scale = scale_of(measure, values.mean())
        found = compare_methods(scale.factor * values, baseline)
        columns = ["mean", "low", "high"]
        if baseline is not None:
            columns += ["difference", "from", "to"]
        table = found[columns].round(scale.digits)
        table.columns.name = f"{measure} ({scale.unit})" if scale.unit else measure
        table["seeds"] = found["n"]
        if baseline is not None and (found["pairs"] != found["n"]).any():
            table["pairs"] = found["pairs"]
        diverged = []
        for method in numbers_of:
            diverged.append(sum(run.state == DIVERGED for run in self._runs[method]))
        if any(diverged):
            table["diverged"] = diverged
        return table

    @property
    def _methods(self) -> list[Name]:
        return list(dict.fromkeys(method for method, _ in self.folders))

    @cached_property
    def _runs(self) -> dict[Name, list[Run]]:
        """The runs of each method."""
        runs: dict[Name, list[Run]] = {}
        for (method, _), folder in self.folders.items():
            runs.setdefault(method, []).append(read_run(folder))
        return runs

    def _basis(self, column: str | None) -> tuple[Decision, list[Name]]:
        """How methods are compared, and these methods.

        Args:
            column: None: that of the methods' result.
        """
        from gcfed.reporting.decision import Decision, decide

        if column is not None:
            rounds = self.frame.index.to_frame(index=False)
            lengths = rounds.groupby(["method", "seed"])["round"].max()
            return Decision(measure_of(column, lengths), {}, {}), self._methods
        decision = decide({str(method): runs for method, runs in self._runs.items()})
        for why in decision.not_compared.values():
            log.warning("Not compared: %s.", why)
        methods = [method for method in self._methods if str(method) not in decision.not_compared]
        return decision, methods

    def figure(self, column: str | None = None) -> Figure:
        """A column over the rounds, as in the report: each method's mean, and one standard
        deviation over the seeds.

        Args:
            column: None: as in :meth:`table`.
        """
        import pandas as pd

        from gcfed.plots.style import looks
        from gcfed.reporting.figures import curves

        decision, methods = self._basis(column)
        column = parse(decision.measure).column
        self.curves(column, methods)  # raises for an unknown column
        shown = []
        for method in methods:
            shown += [(str(method), run, False) for run in self._runs[method]]
        rows = pd.DataFrame(shown, columns=["method", "run", "repeated"])
        return curves(rows, column, looks(rows["method"]))
