"""``gcfed.configure`` and ``gcfed.compare``: configs and comparisons from Python."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf, open_dict

from gcfed.runs.folder import CHECKPOINT, Run, check_folder, read_run
from gcfed.runs.measures import is_accuracy, parse, smooth
from gcfed.utils.compose import composed, shorthand
from gcfed.utils.machine import job

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)
_composing = threading.Lock()  # Hydra composes one config at a time
NOW = "%Y-%m-%d_%H-%M-%S-%f"


def configure(*overrides: str | Iterable[str], folder: str | Path | None = None) -> DictConfig:
    """The config of a run: what ``python src/train.py`` composes of these overrides.

    The run draws no progress bar. Unless ``trainer.devices`` is set, it has one process: forks copy
    a kernel's locks.

    Args:
        overrides: as on the command line, ``"client.epochs=1"``; one by one, or in a list.
        folder: the run's. None: a new one below ``paths.log_dir`` each time the config trains; with
            ``ckpt_path=last`` the folder of the newest run with these settings.

    Raises ValueError for an unknown key or option, and suggests the right one.
    """
    given: list[str] = []
    for words in overrides:
        given += [words] if isinstance(words, str) else words
    given = shorthand(given)
    with _composing:
        cfg = composed(given)
    if folder is None and OmegaConf.is_interpolation(cfg.paths, "output_dir"):
        folder = _folder_of_each_run(given)
    with open_dict(cfg):
        cfg.paths.output_dir = str(folder or cfg.paths.output_dir)
        cfg.callbacks.progress = None
        if cfg.trainer.devices == "auto":
            cfg.trainer.devices = 1
    return cfg


def _folder_of_each_run(overrides: Iterable[str]) -> str:
    """An interpolation, from which ``with_folder`` makes each run's own folder."""
    changed = ",".join(word for word in overrides if not word.startswith(("ckpt_path=", "paths.")))
    changed = re.sub(r"['\"\\$]+", "-", changed)  # the resolver's argument is in quotes
    base = "${paths.log_dir}/${name},${ckpt_path}"
    return f"${{run_dir:{base},'{datetime.now():{NOW}}','{changed}'}}"


def compare(
    configs: Mapping[str, DictConfig],
    seeds: Iterable[int] = (1, 2, 3),
    folder: str | Path | None = None,
    *,
    quiet: bool = False,
) -> Comparison:
    """Trains each config with each seed, one run after another.

    Equal seeds have equal clients, cohorts and weights.

    Args:
        configs: the method's name → its config, of :func:`configure`.
        seeds: replace the configs' own.
        folder: gets the runs' folders, ``<method>_seed<seed>``. A run that exists is continued if
            its config says ``ckpt_path=last``, else refused. None: a new folder in
            ``logs/compare/``.
        quiet: as in :func:`gcfed.train`.

    Raises ValueError before any run if names or seeds are missing or equal, a setting cannot work
    or a folder is taken.
    """
    import pandas as pd

    from gcfed.check import check
    from gcfed.run import train

    seeds = [*seeds]
    names = {method: _file_name(method) for method in configs}
    differ = len({*names.values()}) == len(names) and len({*seeds}) == len(seeds)
    if not (names and seeds and differ):
        raise ValueError(
            f"A comparison needs different names and different seeds: {', '.join(names)}; {seeds}."
        )
    if not folder:
        logs = next(iter(configs.values())).paths.log_dir
        folder = Path(logs, "compare", job() or f"{datetime.now():{NOW}}")
    root = Path(folder).absolute()
    folders = {}
    runs = {}
    for seed in seeds:
        for method, config in configs.items():
            run_folder = root / f"{names[method]}_seed{seed}"
            run = _run_of(config, seed, run_folder)
            check(run)
            check_folder(run, run_folder)
            folders[method, seed] = run_folder
            runs[method, seed] = run
    frames = {key: train(run, quiet=quiet).frame for key, run in runs.items()}
    return Comparison(pd.concat(frames, names=["method", "seed", "round"]).sort_index(), folders)


def _file_name(method: str) -> str:
    """The part of a folder's name that stands for a method."""
    return re.sub(r"[^\w.+-]+", "-", method).strip("-.") or "run"


def _run_of(config: DictConfig, seed: int, folder: Path) -> DictConfig:
    """A method's config with this seed and folder. It continues if the folder has a checkpoint."""
    if config.ckpt_path not in (None, "last"):
        raise ValueError(
            f"ckpt_path={config.ckpt_path}: a comparison continues its own folders, by"
            " ckpt_path=last."
        )
    run = deepcopy(config)
    with open_dict(run):
        run.seed = seed
        run.paths.output_dir = str(folder)
        if not (folder / CHECKPOINT).is_file():
            run.ckpt_path = None
    return run


@dataclass(repr=False)
class Comparison:
    """Runs of several methods with several seeds."""

    frame: pd.DataFrame  # (method, seed, round) → the columns of metrics.csv
    folders: dict[tuple[str, int], Path]  # (method, seed) → the run's

    def __repr__(self) -> str:
        methods = list(dict.fromkeys(method for method, _ in self.folders))
        seeds = list(dict.fromkeys(seed for _, seed in self.folders))
        rounds = self.frame.index.get_level_values("round").max()
        return f"Comparison(methods={methods}, seeds={seeds}, rounds={rounds})"

    def curves(self, column: str, methods: Iterable[str] | None = None) -> dict[str, pd.DataFrame]:
        """A column of each method: [rounds with a value, seeds].

        Raises ValueError if a method has no value.
        """
        values = self.frame.reindex(columns=[column])[column].dropna()
        methods = self._methods if methods is None else methods
        curves = {}
        for method in methods:
            if method not in values.index.unique("method"):
                raise ValueError(
                    f"column={column}: {method} has none; there are {', '.join(self.frame)}."
                )
            curves[method] = values.loc[method].unstack("seed")
        return curves

    def table(self, column: str | None = None, rounds: int = 10) -> pd.DataFrame:
        """A row for each method: a column's mean over seeds and the last ``rounds`` rounds, with
        its 95 % interval. Accuracies are in percent.

        If a run has fewer than three times as many rounds, only the last value of each run counts.

        Args:
            column: None: the column that the methods declare as their result. A method that cannot
                be compared with the others is left out, and the log says why.
        """
        import pandas as pd

        from gcfed.reporting.verdict import interval

        apart: Mapping[str, str] = {}
        if column is None:
            column, apart = self._result()
        curves = self.curves(column, [name for name in self._methods if name not in apart])
        lengths = [runs.apply(pd.Series.last_valid_index).min() for runs in curves.values()]
        averaged = rounds if min(lengths) >= 3 * rounds else 1
        in_percent = is_accuracy(column)
        unit = "%" if in_percent else ""
        rows = {}
        for method, runs in curves.items():
            seeds = runs.apply(lambda run: smooth(run.dropna(), averaged).iloc[-1])
            if in_percent:
                seeds = 100 * seeds
            low, high = interval(seeds)
            rows[method] = (seeds.mean(), low, high, unit, column, len(seeds), averaged)
        names = ["mean", "low", "high", "unit", "column", "seeds", "rounds"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=names)

    @property
    def _methods(self) -> list[str]:
        return list(dict.fromkeys(method for method, _ in self.folders))

    def _result(self) -> tuple[str, Mapping[str, str]]:
        """The column of the result, and why a method is not judged by it, by its name."""
        from gcfed.reporting.judged import judged

        runs: dict[str, list[Run]] = {method: [] for method in self._methods}
        for (method, _), folder in self.folders.items():
            runs[method].append(read_run(folder))
        decision = judged(runs)
        for why in decision.apart.values():
            log.warning("Not compared: %s.", why)
        return parse(decision.measure)[1], decision.apart

    def figure(self, column: str | None = None) -> Figure:
        """A column over the rounds, as in the report: each method's mean, and one standard
        deviation over the seeds.

        Args:
            column: None: as in :meth:`table`.
        """
        import pandas as pd

        from gcfed.plots.style import looks
        from gcfed.reporting.figures import curves

        apart: Mapping[str, str] = {}
        if column is None:
            column, apart = self._result()
        shown = [name for name in self._methods if name not in apart]
        self.curves(column, shown)  # raises for an unknown column
        runs = []
        for (method, _), folder in self.folders.items():
            if method in shown:
                runs.append((method, read_run(folder)))
        rows = pd.DataFrame(runs, columns=["method", "run"]).assign(repeated=False)
        return curves(rows, column, looks(rows["method"]))
