"""An equal search for each cell of a table, with Optuna: as many trials for each, none past the
edge of stability.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from omegaconf import DictConfig
from optuna.trial import TrialState

from gcfed.assemble import declared_result
from gcfed.folders.folder import CONFIG, RESULTS, TRIALS, Run, read_run
from gcfed.folders.lock import locked
from gcfed.folders.measures import check_judges
from hydra_plugins.gcfed_optuna import next_trial, open_study, space_of, write
from reproductions.compare import column_of, measured
from reproductions.tables import Job, Search

SAMPLER = {"_target_": "optuna.samplers.TPESampler", "n_startup_trials": 8}
RISE = 1000.0  # a loss that grows by this factor was past the edge of stability
Compose = Callable[[Sequence[str]], DictConfig]
Train = Callable[[Sequence[str], Path], str]  # overrides and folder → why the run failed, or ""
LOST = {
    "train/nonfinite_clients": "client updates left out",
    "train/refused_steps": "server steps taken back",
}


def tune(
    search: Search,
    jobs: Mapping[str, Job],
    root: Path,
    compose: Compose,
    train: Train,
    dry_run: bool,
) -> tuple[dict[str, Job], dict[str, str], list[tuple[DictConfig, int]]]:
    """Returns the jobs with the best parameters of their cells, the reasons of left-out jobs by
    title, and the trials that a dry run leaves to do.

    ValueError, before any search, if a config or a space is invalid, or if a job and a search share
    a seed.
    """
    cells = {job.cell: job for job in jobs.values()}
    spaces, common, configs = dict[str, Any](), dict[str, list[str]](), dict[str, DictConfig]()
    for cell, job in cells.items():
        knobs = [more for override, more in search.knobs.items() if override in job.overrides]
        words = {key: word for more in (search.params, *knobs) for key, word in more.items()}
        spaces[cell] = space_of([f"{key}={word}" for key, word in words.items()])[0]
        common[cell] = [
            *(word for word in job.overrides if not word.startswith("seed=")),
            *search.overrides,
        ]
        configs[cell] = compose(common[cell])
        if "methods" in configs[cell]:
            result = declared_result(configs[cell])
            key = f"{cell}: search.metric={search.metric}"
            check_judges(column_of(search.metric), result, key)
        if both := {*(search.seeds or [configs[cell].seed])} & {job.seed for job in jobs.values()}:
            raise ValueError(
                f"seed={min(both)} is in a search and in a run: set other seeds, or other"
                " search.seeds."
            )
    for override in search.knobs.keys() - {
        word for job in cells.values() for word in job.overrides
    }:
        print(f"no job has {override}: its search.knobs are unused")
    best, trials = dict[str, list[str]](), list[tuple[DictConfig, int]]()
    for cell, cfg in configs.items():
        folder = root / "searches" / cell
        left = dry_run * max(0, search.n_trials - len([*folder.glob("trial_*")]))
        trials += [(cfg, cfg.rounds)] * (left * (len(search.seeds) or 1))
        if not dry_run:
            print(f"search for {cell}", flush=True)
            run_trials(search, spaces[cell], common[cell], folder, cfg, train)
        found = (
            yaml.safe_load((folder / RESULTS).read_text()) if (folder / RESULTS).is_file() else {}
        )
        if found or left:
            best[cell] = [f"{key}={value}" for key, value in found.get("best_params", {}).items()]
    why, folder = "no trial of its search has a value: see", root / "searches"
    lost = {
        job.title: f"{why} {folder / job.cell / TRIALS}"
        for job in jobs.values()
        if job.cell not in best
    }
    tuned = {
        k: job._replace(overrides=job.overrides + best[job.cell])
        for k, job in jobs.items()
        if job.cell in best
    }
    return tuned, lost, trials


def run_trials(
    search: Search,
    space: Mapping[str, Any],
    common: Sequence[str],
    folder: Path,
    cfg: DictConfig,
    train: Train,
) -> None:
    """Runs trials until ``n_trials`` have ended.

    A stopped trial continues with the values that it had drawn.
    """
    smaller = re.search("loss|error|rmse|rounds", search.metric)
    with locked(folder / ".lock") as holder:
        if holder:
            raise ValueError(
                f"{holder} is at the search in {folder}: give each process other rows."
            )
        study = open_study(
            folder,
            cfg,
            space,
            f"{search.metric} {search.seeds}",
            "minimize" if smaller else "maximize",
        )
        for point in [] if study.trials else search.points:
            study.enqueue_trial(point)
        while sum(trial.state.is_finished() for trial in study.trials) < search.n_trials:
            trial = next_trial(study, space, SAMPLER, search.seed)
            place, drawn = (
                folder / f"trial_{trial.number:04d}",
                [f"{k}={v}" for k, v in trial.params.items()],
            )
            print(f"trial {trial.number + 1} of {search.n_trials}: {' '.join(drawn)}", flush=True)
            runs = {place / f"seed_{seed}": [f"seed={seed}"] for seed in search.seeds} or {
                place: []
            }
            outcomes = [
                outcome(run, search.metric, train([*common, *drawn, *seed], run))
                for run, seed in runs.items()
            ]
            if why := "; ".join(why for _, _, why in outcomes if why):
                trial.set_user_attr("reason", why)
                print(f"trial {trial.number + 1}: {why}", flush=True)
            if any(value is None for value, _, _ in outcomes):
                study.tell(trial, state=TrialState.FAIL)
            else:
                # above 0: never the best
                trial.set_constraint("edges", sum(past for _, past, _ in outcomes))
                study.tell(trial, float(np.mean([value for value, _, _ in outcomes])))
            write(study, folder, search.metric)
        write(study, folder, search.metric)


def outcome(folder: Path, metric: str, reason: str) -> tuple[float | None, float, str]:
    """What a run of a trial measured, how far it was past the edge, and why it has no value or is
    refused.
    """
    run = read_run(folder) if (folder / CONFIG).is_file() else None
    value = measured(run, metric) if run and run.has_ended else None
    if run is None or value is None:
        return (
            None,
            0.0,
            f"{folder.name}: {reason or (run.note if run else '') or f'{metric} is not finite'}",
        )
    found = edges(run)
    return (
        value,
        sum(past for past, _ in found),
        "; ".join(f"{folder.name}: {words}" for _, words in found),
    )


def edges(run: Run) -> list[tuple[float, str]]:
    """How far a run was past the edge of stability, with a description: updates left out, server
    steps taken back, or a loss that grew a thousandfold and above its value in the first round
    (never a negative loss).
    """
    counts = {what: float(run.curve(column).sum()) for column, what in LOST.items()}
    found = [(count, f"{count:g} {what}") for what, count in counts.items() if count]
    for column in ("train/loss", "test/loss"):
        curve = run.curve(column)
        least = curve.cummin().shift()  # of the rounds before
        past = curve[(least >= 0) & (curve >= RISE * least) & (curve > curve.head(1).sum())]
        if len(past):
            t = past.idxmax()
            words = f"{column} rose from {least[t]:.3g} to {curve[t]:.3g} in round {t}"
            found.append((float(np.log10(min(curve[t] / least[t], 1e30))), words))
    return found
