"""Configs and comparisons from Python: what ``import gcfed`` offers beside ``train`` and ``report``."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from omegaconf import DictConfig, OmegaConf, open_dict

from gcfed.report.verdict import interval
from gcfed.runs.folder import CHECKPOINT, check_folder
from gcfed.runs.measures import smooth
from gcfed.utils.checked import Whole, fits
from gcfed.utils.compose import Composer, shorthand
from gcfed.utils.machine import job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_compose = Composer()
_composing = threading.Lock()  # Hydra composes one config at a time
NOW = "%Y-%m-%d_%H-%M-%S-%f"


def configure(*overrides: str | Iterable[str], folder: str | Path | None = None) -> DictConfig:
    """The config of a run: what ``python src/train.py`` composes of these overrides.

    The run draws no progress bar, and takes one process unless ``trainer.devices`` says otherwise: a notebook's kernel
    has threads, and a fork would copy their locks.

    Args:
        overrides: as on the command line, ``"client.epochs=1"``; one by one, or in a list.
        folder: of one run. None: a new one in ``logs/<name>/`` each time the config trains; with ``ckpt_path=last`` the
            folder of the newest run with these settings.

    Raises ValueError if an override names no key or option; says which was meant.
    """
    words = shorthand(word for given in overrides for word in ([given] if isinstance(given, str) else given))
    with _composing:
        cfg = _compose(words)
    if folder is None and OmegaConf.is_interpolation(cfg.paths, "output_dir"):
        changed = ",".join(word for word in words if not word.startswith(("ckpt_path=", "paths.")))
        changed = re.sub(r"['\"\\$]+", "-", changed)  # the resolver's argument is in quotes
        base = "${paths.log_dir}/${name},${ckpt_path}"
        folder = f"${{run_dir:{base},'{datetime.now():{NOW}}','{changed}'}}"  # with_folder makes it each run's own
    with open_dict(cfg):
        cfg.paths.output_dir = str(folder or cfg.paths.output_dir)
        cfg.callbacks.progress = None
        if cfg.trainer.devices == "auto":
            cfg.trainer.devices = 1
    return cfg


def compare(
    configs: Mapping[str, DictConfig], seeds: Iterable[int] = (1, 2, 3), folder: str | Path | None = None
) -> Comparison:
    """Trains each config with each seed, one after the other; equal seeds have equal clients, cohorts and weights.

    Args:
        configs: the method's name → its config, of :func:`configure`.
        seeds: replace the configs' own.
        folder: of the runs' folders, ``<method>_seed<seed>``. Runs that are there are continued if the config says
            ``ckpt_path=last``, else refused. None: a new one in ``logs/compare/``.

    Raises ValueError if seeds are equal, a setting cannot work or a folder holds another run, before any run.
    """
    from gcfed.check import check
    from gcfed.run import train

    chosen: list[int] = fits("seeds", list(seeds), Sequence[Whole])
    names = {method: re.sub(r"[^\w.+-]+", "-", method).strip("-.") or "run" for method in configs}
    if not names or len({*names.values()}) < len(names) or not chosen or len({*chosen}) < len(chosen):
        raise ValueError(f"A comparison needs different names and different seeds: {', '.join(names)}; {chosen}.")
    logs = next(iter(configs.values())).paths.log_dir
    root = Path(folder or Path(logs, "compare", job() or f"{datetime.now():{NOW}}")).absolute()
    folders = {(method, seed): root / f"{names[method]}_seed{seed}" for seed in chosen for method in configs}
    runs = {key: deepcopy(configs[key[0]]) for key in folders}
    for (method, seed), run in runs.items():
        place = folders[method, seed]
        if run.ckpt_path not in (None, "last"):
            raise ValueError(f"ckpt_path={run.ckpt_path}: a comparison continues its own folders, by ckpt_path=last.")
        with open_dict(run):
            run.seed, run.paths.output_dir = seed, str(place)
            run.ckpt_path = run.ckpt_path if (place / CHECKPOINT).is_file() else None
        check(run)
        check_folder(run, place)
    frames = {key: train(run).frame for key, run in runs.items()}
    return Comparison(pd.concat(frames, names=["method", "seed", "round"]).sort_index(), folders)


@dataclass
class Comparison:
    """Runs of several methods with several seeds."""

    frame: pd.DataFrame  # (method, seed, round) → the columns of metrics.csv
    folders: dict[tuple[str, int], Path]  # (method, seed) → the run's

    def curves(self, column: str) -> dict[str, pd.DataFrame]:
        """A column of each method, in the order in which they were given: [rounds with a value, seeds]."""
        methods = list(dict.fromkeys(method for method, _ in self.folders))
        values = self.frame.reindex(columns=[column])[column].dropna()
        if lacking := [method for method in methods if method not in values.index.unique("method")]:
            raise ValueError(f"column={column}: {lacking[0]} has none; there are {', '.join(self.frame)}.")
        return {method: values.loc[method].unstack("seed") for method in methods}

    def table(self, column: str = "test/acc", rounds: int = 10) -> pd.DataFrame:
        """A row for each method: a column's mean over seeds and the last so many rounds, with its 95 % interval.

        If a run has fewer than three times as many, the last value of each run alone; ``rounds`` says how many.
        """
        curves = self.curves(column)
        if min(runs.apply(pd.Series.last_valid_index).min() for runs in curves.values()) < 3 * rounds:
            rounds = 1
        last = {m: runs.apply(lambda run: smooth(run.dropna(), rounds).iloc[-1]) for m, runs in curves.items()}
        rows = {method: (seeds.mean(), *interval(seeds), len(seeds), rounds) for method, seeds in last.items()}
        return pd.DataFrame.from_dict(rows, orient="index", columns=["mean", "low", "high", "seeds", "rounds"])

    def figure(self, column: str = "test/acc") -> Figure:
        """A column over the rounds: each seed thin, and each method's mean thick."""
        from matplotlib.figure import Figure

        from gcfed.plots.style import FACTORS, LABELS, looks, styled, ticks

        curves = self.curves(column)

        @styled
        def draw() -> Figure:
            figure = Figure(figsize=(6.4, 3.8))
            axes = figure.subplots()
            for method, values in curves.items():
                values, look = values * FACTORS.get(column, 1), looks(curves)[method]
                axes.plot(values, **look, alpha=0.35, linewidth=0.8)
                axes.plot(values.mean(axis=1), **look, label=method, marker="o" if len(values) == 1 else None)
            axes.set(xlabel="communication round", ylabel=LABELS.get(column, column))
            ticks(axes)
            axes.legend()
            return figure

        return draw()
