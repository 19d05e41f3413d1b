"""A search with Optuna as a sweep: asks for trials, runs them as jobs, and goes on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import numpy as np
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig

from gcfed.report.measures import value
from gcfed.report.runs import Run
from gcfed.study.book import Book, name_of, values_of
from gcfed.study.launch import launch
from gcfed.study.overrides import quoted
from gcfed.study.state import as_run, checkpoint, made_of
from gcfed.utils.lock import locked
from gcfed.utils.words import say

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

DATABASE = "search.db"


def search(
    config: DictConfig,
    context: HydraContext,
    launcher: Launcher,
    arguments: list[str],
    *,
    direction: str,
    n_trials: int,
    n_jobs: int,
    seed: int,
    storage: str | None,
    sampler: DictConfig,
    params: Mapping[str, Any],
) -> None:
    """Runs trials until ``n_trials`` have ended; the same command continues a search that was stopped.

    A trial whose value is not finite is pruned and counts; one that fails is noted with its reason and another one
    takes its place. ``trials.csv`` and ``optimization_results.yaml`` are written after every trial. One process does a
    search. The exit code is 1 where a trial has failed.

    Raises:
        ValueError: settings that cannot work, Optuna is not installed, the folder holds another search, or nothing
            more can come of this one: a metric that runs do not have, or several failures in a row.
    """
    optuna = _optuna()
    from gcfed.study.space import read_space

    metric = config.optimized_metric
    _check(metric, direction, {"n_trials": n_trials, "n_jobs": n_jobs})
    space, fixed, texts = read_space(params or {}, [a for a in arguments if a != "ckpt_path=last"])
    if not space:
        raise ValueError("hydra.sweeper.params is empty: name keys and intervals, such as gc.lam: interval(0, 1).")
    setting = {"space": texts, "metric": metric, "direction": direction}
    setting |= _fixed(context.config_loader.load_sweep_config(config, fixed), texts)
    root = Path(config.hydra.sweep.dir).absolute()
    with locked(root / ".lock") as holder:
        if holder:
            raise ValueError(f"{holder} is at the search in {root}: one process does a search, n_jobs trials at once.")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            study_name="search" if storage is None else root.name,
            storage=storage or f"sqlite:///{root / DATABASE}",
            direction=direction,
            load_if_exists=True,
        )
        book = Book(study, root, metric)
        book.open(setting)
        say(f"search in {root}: {len(book.done)} of {n_trials} trials done; {metric}, {direction}")
        while len(book.done) < n_trials:
            batch = book.begun[:n_jobs]  # what a stopped search left behind
            while len(batch) < min(n_jobs, n_trials - len(book.done)):
                number = len(study.trials)
                study.sampler = hydra.utils.instantiate(sampler, seed=_drawn(seed, number))
                study.ask(fixed_distributions=space)
                batch.append(study.trials[number])
            for i, trial in enumerate(batch, start=len(book.done) + 1):
                say(f"{name_of(trial)}, {i} of {n_trials}: {values_of(trial)}{book.best}")
            outcomes = launch(launcher, [[*fixed, *_own(trial, root)] for trial in batch], batch[0].number)
            for trial, outcome in zip(batch, outcomes, strict=True):
                book.enter(trial, outcome)
            book.write()
        book.close()


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ValueError(
            "hparams_search needs Optuna, which is an extra: .venv/bin/uv pip install -e '.[optuna]'"
        ) from None
    return optuna


def _check(metric: str | None, direction: str, numbers: Mapping[str, Any]) -> None:
    for key, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"hydra.sweeper.{key}={number} must be a whole number of at least 1.")
    if metric is None:
        raise ValueError("optimized_metric is not set: name what the search optimizes, such as test/acc_smooth10.")
    try:
        value(Run(Path(), {}, (), {}, {}, "", ""), metric)
    except ValueError as error:
        raise ValueError(f"optimized_metric={metric}: {error}") from None
    if direction not in ("maximize", "minimize"):
        raise ValueError(f"hydra.sweeper.direction={direction} must be maximize or minimize.")


def _fixed(cfg: DictConfig, searched: Collection[str]) -> dict[str, Any]:
    """What all trials have in common, wherever it was set: what changes a run's numbers, but for what is searched."""
    made = made_of(as_run(cfg))
    common = {**made.setting, "rounds": made.rounds, "eval_every": made.eval_every}
    inside = tuple(f"{key}." for key in searched)
    kept = {key: v for key, v in common.items() if key not in searched and not key.startswith(inside)}
    return json.loads(json.dumps(kept, default=str))


def _drawn(seed: int, number: int) -> int:
    """The sampler's seed for a trial: what it draws depends on this and on the trials so far, not on a restart."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def _own(trial: FrozenTrial, root: Path) -> list[str]:
    from gcfed.study.space import text_of

    own = [f"{key}={text_of(drawn)}" for key, drawn in trial.params.items()]
    own += [f"hydra.sweep.dir={quoted(str(root))}", f"hydra.sweep.subdir={name_of(trial)}"]
    begun = checkpoint(root / name_of(trial))
    return [*own, f"ckpt_path={quoted(str(begun))}"] if begun.is_file() else own
