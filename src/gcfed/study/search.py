"""A search with Optuna as a sweep: asks for trials, runs them as jobs, and goes on where it was stopped."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import numpy as np
import yaml
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig

from gcfed.report.measures import value
from gcfed.report.runs import read_run
from gcfed.study.launch import launch, reason_of
from gcfed.study.overrides import key_of, quoted
from gcfed.study.state import checkpoint
from gcfed.study.sweep import say
from gcfed.utils.files import replacing
from gcfed.utils.resolvers import changes_results

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

log = logging.getLogger(__name__)
DATABASE, TABLE, BEST = "search.db", "trials.csv", "optimization_results.yaml"


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
    """Runs trials until there are ``n_trials``; the same command continues a search that was stopped.

    A trial that fails, or whose value is not finite, is noted as such and the search goes on. ``trials.csv`` and
    ``optimization_results.yaml`` in the search's folder are written after every trial.

    Raises:
        ValueError: settings that cannot work, Optuna is not installed, or the folder holds another search.
    """
    optuna = _optuna()
    from gcfed.study.space import read_space

    metric = config.optimized_metric
    for key, number in (("n_trials", n_trials), ("n_jobs", n_jobs)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"hydra.sweeper.{key}={number} must be a whole number of at least 1.")
    if metric is None:
        raise ValueError("optimized_metric is not set: name what the search optimizes, such as test/acc_smooth10.")
    if direction not in ("maximize", "minimize"):
        raise ValueError(f"hydra.sweeper.direction={direction} must be maximize or minimize.")
    space, fixed, texts = read_space(params or {}, [a for a in arguments if a != "ckpt_path=last"])
    if not space:
        raise ValueError("hydra.sweeper.params is empty: name keys and intervals, such as gc.lam: interval(0, 1).")
    root = Path(config.hydra.sweep.dir).absolute()
    root.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name="search" if storage is None else root.name,
        storage=storage or f"sqlite:///{root / DATABASE}",
        direction=direction,
        load_if_exists=True,
    )
    kept = sorted(o for o in fixed if changes_results(o) or key_of(o) in ("rounds", "eval_every"))
    _same_search(study, {"space": texts, "overrides": kept, "metric": metric, "direction": direction}, root)
    say(f"search in {root}: {len(_done(study))} of {n_trials} trials done; {metric}, {direction}")

    reasons: dict[int, str] = {}
    while len(_done(study)) < n_trials or _begun(study):
        batch = _begun(study)[:n_jobs]  # what a stopped search left behind
        while not batch or (len(batch) < n_jobs and len(_done(study)) + len(batch) < n_trials):
            number = len(study.trials)
            study.sampler = hydra.utils.instantiate(sampler, seed=_drawn(seed, number))
            study.ask(fixed_distributions=space)
            batch.append(study.trials[number])
        for trial in batch:
            say(f"{_folder(trial)}, {trial.number + 1} of {n_trials}: {_values(trial)}{_best(study)}")
        jobs = [[*fixed, *_own(trial, root)] for trial in batch]
        for trial, result in zip(batch, launch(launcher, jobs, batch[0].number), strict=True):
            reasons[trial.number] = _tell(study, trial, result, metric, root)
        _write(study, root)
    _write(study, root)
    _close(study, reasons, root)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ValueError(
            "hparams_search needs Optuna, which is an extra: .venv/bin/uv pip install -e .[optuna]"
        ) from None
    return optuna


def _same_search(study: Study, setting: dict[str, Any], root: Path) -> None:
    """Refuses to mix the trials of two searches."""
    then = study.user_attrs.get("setting")
    if then is None:
        study.set_user_attr("setting", setting)
    elif then != setting:
        differ = "; ".join(
            f"{key} was {then.get(key)}, now {now}" for key, now in setting.items() if then.get(key) != now
        )
        raise ValueError(
            f"{root} holds another search: {differ}. Give this one a folder with hydra.sweep.dir=<folder>."
        )


def _done(study: Study) -> list[FrozenTrial]:
    return [t for t in study.trials if t.state.is_finished()]


def _begun(study: Study) -> list[FrozenTrial]:
    return [t for t in study.trials if not t.state.is_finished()]


def _drawn(seed: int, number: int) -> int:
    """The sampler's seed for a trial: what it draws depends on this and on the trials so far, not on a restart."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def _folder(trial: FrozenTrial) -> str:
    return f"trial_{trial.number:04d}"


def _values(trial: FrozenTrial) -> str:
    return " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in trial.params.items())


def _best(study: Study) -> str:
    if not any(trial.state.name == "COMPLETE" for trial in study.trials):
        return ""
    return f"; best so far {study.best_value:.4g} in {_folder(study.best_trial)}"


def _own(trial: FrozenTrial, root: Path) -> list[str]:
    from gcfed.study.space import text_of

    own = [f"{key}={text_of(drawn)}" for key, drawn in trial.params.items()]
    own += [f"hydra.sweep.dir={quoted(str(root))}", f"hydra.sweep.subdir={_folder(trial)}"]
    begun = checkpoint(root / _folder(trial))
    return [*own, f"ckpt_path={quoted(str(begun))}"] if begun.is_file() else own


def _tell(study: Study, trial: FrozenTrial, result: JobReturn, metric: str, root: Path) -> str:
    """Notes how a trial ended; returns why it failed, or ""."""
    from optuna.trial import TrialState

    reason = reason_of(result)
    if not reason:
        found = result.return_value
        if found is None:  # a run that was at its end before it was continued, or a measure over its rounds
            found = value(read_run(root / _folder(trial)), metric)
        if found is not None and math.isfinite(found):
            study.tell(trial.number, float(found))
            return ""
        reason = f"optimized_metric={metric} is {'not among what the run measured' if found is None else found}"
    study.tell(trial.number, state=TrialState.FAIL if reason_of(result) else TrialState.PRUNED)
    log.error("%s failed: %s", _folder(trial), reason)
    return reason


def _write(study: Study, root: Path) -> None:
    """``trials.csv``, a row a trial, and the best one."""
    trials = study.trials
    keys = list(dict.fromkeys(key for trial in trials for key in trial.params))
    with replacing(root / TABLE) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["number", "state", "value", "seconds", "folder", *keys])
        for trial in trials:
            seconds = "" if trial.duration is None else round(trial.duration.total_seconds(), 1)
            shown = "" if trial.value is None else trial.value
            values = [trial.params.get(key, "") for key in keys]
            writer.writerow([trial.number, trial.state.name.lower(), shown, seconds, _folder(trial), *values])
    if any(trial.state.name == "COMPLETE" for trial in trials):
        best = study.best_trial
        found = {
            "name": "optuna", "best_params": best.params, "best_value": best.value, "best_trial": best.number,
            "folder": _folder(best),
        }  # fmt: skip
        with replacing(root / BEST) as temporary:
            temporary.write_text(yaml.safe_dump(found, sort_keys=False))


def _close(study: Study, reasons: Mapping[int, str], root: Path) -> None:
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    failed = len(study.trials) - len(complete)
    if not complete:
        last = next(reversed([r for r in reasons.values() if r]), "see trials.csv")
        raise ValueError(f"no trial of the search in {root} has a value: {last}")
    say(
        f"search: {len(complete)} trials{f', {failed} failed' if failed else ''}; best {study.best_value:.4g} in "
        f"{_folder(study.best_trial)}: {_values(study.best_trial)}",
        f"  {root / TABLE}",
    )
