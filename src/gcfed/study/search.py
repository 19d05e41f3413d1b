"""A search with Optuna as a sweep: Hydra's launcher makes the runs, Optuna's storage keeps the trials."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, RangeSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf

from gcfed.report import tables
from gcfed.runs.folder import CONFIG, read_run
from gcfed.runs.identity import differences, leaves
from gcfed.runs.measures import parse, value
from gcfed.study.jobs import check_seeds
from gcfed.study.launch import launch
from gcfed.utils.files import replacing
from gcfed.utils.instantiate import require
from gcfed.utils.lock import locked
from gcfed.utils.number import choice, number, word
from gcfed.utils.words import say

try:
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError as error:
    remedy = "A search needs Optuna, which is an extra: .venv/bin/uv pip install -e '.[optuna]'"
    raise ValueError(f"{remedy} ({error})") from error

log = logging.getLogger(__name__)
optuna.logging.set_verbosity(optuna.logging.WARNING)


def search(config: Any, context: Any, launcher: Any, arguments: list[str], **settings: Any) -> bool:
    """Runs trials until ``n_trials`` have ended; the same command continues a search that was stopped.

    A trial's value is the mean over its runs, one a seed. One with a run that fails, or that has no finite value
    ("pruned"), counts and keeps its reason, as in Optuna's own loop.

    Args:
        settings: those of ``configs/hydra/sweeper/optuna.yaml``.

    Returns:
        Whether a trial has a value, and none failed.

    Raises:
        ValueError: settings that cannot work, the folder holds another search, or a metric that runs do not have.
    """
    check_settings("hydra.sweeper", **settings)
    metric, n_trials, n_jobs = config.optimized_metric, settings["n_trials"], settings["n_jobs"]
    seeds = settings["seeds"] or []
    space, common = read_space(settings["params"], [a for a in arguments if a != "ckpt_path=last"])
    check_metric("optimized_metric", metric)
    if not space:
        raise ValueError("A search needs hydra.sweeper.params, such as 'gc.lam=interval(0.0, 1.0)'.")
    if settings["direction"] == "maximize" and tables.describe(metric)[2] is False:
        raise ValueError(
            f"{metric} is better where it is smaller: set hydra.sweeper.direction=minimize "
            "(of a tuned study +study.search.direction=minimize)."
        )
    cfg = context.config_loader.load_sweep_config(config, common)
    fixed = {key: v for key, v in leaves(cfg).items() if not any(f"{key}.".startswith(f"{name}.") for name in space)}
    fixed |= {"rounds": cfg.rounds, "eval_every": cfg.eval_every, "metric": metric, "direction": settings["direction"]}
    fixed |= {f"params.{key}": repr(distribution) for key, distribution in space.items()}
    if seeds:
        fixed["seed"], common = [*seeds], [override for override in common if not override.startswith("seed=")]
    root = Path(config.hydra.sweep.dir).absolute()
    storage = settings["storage"] or f"sqlite:///{root}/search.db"
    with locked(root / ".lock") as holder:
        if holder:
            raise ValueError(f"{holder} is at the search in {root}: one process does a search, n_jobs trials at once.")
        name = root.name if settings["storage"] else "search"
        study = opened(storage, study_name=name, direction=fixed["direction"])
        known = study.user_attrs.get("fixed", fixed)
        if not any(trial.state.is_finished() for trial in study.trials):
            known |= {"metric": metric}  # one that runs do not have ended the search; another may take its place
        if odd := differences(known, fixed):
            raise ValueError(f"{root} holds another search: {odd}. Take another folder, hydra.sweep.dir=<folder>.")
        study.set_user_attr("fixed", fixed)
        while (ended := sum(trial.state.is_finished() for trial in study.trials)) < n_trials:
            # First what a stopped search left behind.
            trials = [Trial(study, t._trial_id) for t in study.trials if not t.state.is_finished()][:n_jobs]
            while len(trials) < min(n_jobs, n_trials - ended):
                folder = root / f"trial_{len(study.trials):04d}"
                if folder.exists():  # what it holds is of other draws
                    raise ValueError(f"{storage} does not know of {folder}: move the folder away, or take another one.")
                # What is drawn depends on the seed and the trials so far, not on a restart.
                draw = np.random.SeedSequence([settings["seed"], len(study.trials)]).generate_state(1)
                study.sampler = sampler_of(settings["sampler"], int(draw[0]))
                trials.append(study.ask(space))
            jobs: dict[Path, list[str]] = {}
            for trial in trials:
                say(f"trial {trial.number + 1} of {n_trials}: {describe(trial)}{best(study)}")
                overrides = [*common, *(f"{key}={number}" for key, number in trial.params.items())]
                folder = root / name_of(trial)
                jobs |= {folder / f"seed_{seed}": [*overrides, f"seed={seed}"] for seed in seeds} or {folder: overrides}
            order = [(overrides, folder) for folder, overrides in jobs.items()]
            reasons = dict(zip(jobs, launch(launcher, order, trials[0].number * (len(seeds) or 1)), strict=True))
            for trial in trials:
                folder = root / name_of(trial)
                tell(study, trial, {run: reasons[run] for run in reasons if folder in (run, run.parent)}, metric)
                write(study, root)
        failures = len(study.get_trials(states=(TrialState.FAIL,)))
        say(f"search in {root}: {ended} trials, {failures} failed{best(study) or '; none has a value'}")
        return bool(best(study)) and not failures


def check_settings(
    where: str,
    *,
    direction: Any,
    n_trials: Any,
    n_jobs: Any,
    seed: Any,
    seeds: Any,
    storage: Any,
    sampler: Any,
    params: Any,
    **unknown: Any,
) -> None:
    """Refuses settings of a search that cannot work, before anything is made.

    Raises:
        ValueError: names the setting below ``where``.
    """
    for key in unknown:
        raise ValueError(f"{where}.{key}={unknown[key]} is read by nothing; ~{where}.{key} leaves it out.")
    choice(f"{where}.direction", direction, ("maximize", "minimize"))
    number(f"{where}.n_trials", n_trials, 1, whole=True)
    number(f"{where}.n_jobs", n_jobs, 1, whole=True)
    number(f"{where}.seed", seed, 0, whole=True)
    check_seeds(f"{where}.seeds", seeds)
    if storage is not None and not (isinstance(storage, str) and storage):
        raise ValueError(f"{where}.storage={storage} must be an address such as sqlite:///search.db, or null.")
    space, made = read_space(params, [], f"{where}.params")[0], sampler_of(sampler, 0)
    try:
        optuna.create_study(sampler=made).ask(space)
    except Exception as error:  # some samplers look at their settings only now
        raise ValueError(f"{where}.sampler cannot draw from these params: {error}") from error


def check_metric(key: str, metric: Any) -> None:
    """Refuses what is no measure of a finished run.

    Raises:
        ValueError: names the key.
    """
    if metric is None or not word(key, metric):
        raise ValueError(f"{key}={metric}: a search needs a measure of its runs, such as mean:val/acc[10].")
    try:
        parse(metric)
    except ValueError as error:
        raise ValueError(f"{key}={metric}: {error}") from None


def sampler_of(node: Any, seed: int) -> optuna.samplers.BaseSampler:
    """Optuna's sampler of ``hydra.sweeper.sampler``.

    Raises:
        ValueError: it makes none.
    """
    key = "hydra.sweeper.sampler"
    made = require(OmegaConf.create({"hydra": {"sweeper": {"sampler": node}}}).hydra.sweeper, "sampler", seed=seed)
    if not isinstance(made, optuna.samplers.BaseSampler):
        raise ValueError(f"{key}._target_={node.get('_target_')} is none of optuna.samplers.")
    return made


def opened(storage: str, **settings: Any) -> optuna.Study:
    """The search that lies there, or a new one.

    Raises:
        ValueError: it cannot be opened; names it.
    """
    try:
        return optuna.create_study(storage=storage, load_if_exists=True, **settings)
    except Exception as error:  # SQLAlchemy's, a driver's, Optuna's own
        reason = str(error).splitlines()[0]
        raise ValueError(f"hydra.sweeper.storage={storage} cannot be opened: {reason}") from error


def read_space(
    params: Any, arguments: list[str], key: str = "hydra.sweeper.params"
) -> tuple[dict[str, BaseDistribution], list[str]]:
    """The space of a search in Optuna's words, out of Hydra's, and the overrides that all trials share.

    The command line wins over ``params``: a key to which it gives one value is searched no more.

    Raises:
        ValueError: words that are no override, or an interval that cannot be searched; names them.
    """
    if not isinstance(params, Mapping):
        raise ValueError(f"{key}={params} must be a group of words such as gc.lam: interval(0.0, 1.0).")
    for name, words in params.items():
        if not isinstance(words, str) or not words:
            raise ValueError(f"{key}.{name}={words} must be words such as interval(0.0, 1.0).")
    space: dict[str, BaseDistribution] = {}
    common: dict[str, str] = {}
    for text in [*(f"{key}={sweep}" for key, sweep in params.items()), *arguments]:
        try:
            override = OverridesParser.create().parse_override(text)
            key, sweep = override.get_key_element(), override.value()
            space.pop(key, None)
            common.pop(key, None)
            if isinstance(sweep, IntervalSweep):
                number("its start", sweep.start), number("its end", sweep.end)
                space[key] = kind_of(sweep.start, sweep.end)(sweep.start, sweep.end, log="log" in sweep.tags)
            elif isinstance(sweep, RangeSweep):
                number("its length", (sweep.stop - sweep.start) / sweep.step, 1e-9, 1e6)  # type: ignore[operator]
                values = list(sweep.range())
                space[key] = kind_of(*values)(values[0], values[-1], step=sweep.step)
            elif override.is_sweep_override():
                space[key] = CategoricalDistribution(list(override.sweep_string_iterator()))
            else:
                common[key] = text
        except (HydraException, ValueError, ArithmeticError) as error:
            raise ValueError(f"{text} cannot be searched: {str(error).splitlines()[0]}") from None
    return space, list(common.values())


def kind_of(*ends: Any) -> Any:
    return IntDistribution if all(isinstance(end, int) for end in ends) else FloatDistribution


def tell(study: optuna.Study, trial: Trial, runs: Mapping[Path, str], metric: str) -> None:
    """Takes a trial's value, the mean over its runs; ``runs``: folder → the launcher's word on why it failed, or ""."""
    read = {folder.name: read_value(folder, metric, reason) for folder, reason in runs.items()}
    for state in (TrialState.FAIL, TrialState.PRUNED):
        if lacks := [f"{name}: {why}" if len(read) > 1 else why for name, (s, _, why) in read.items() if s == state]:
            trial.set_user_attr("reason", "; ".join(lacks))
            log.error("%s %s: %s", name_of(trial), state.name.lower(), "; ".join(lacks))
            study.tell(trial, state=state)
            return
    study.tell(trial, float(np.mean([number for _, number, _ in read.values()])))


def read_value(folder: Path, metric: str, reason: str) -> tuple[TrialState, float, str]:
    """What became of a run, its value, and why it has none."""
    if not ((folder / CONFIG).is_file() and (run := read_run(folder)).has_ended):
        return TrialState.FAIL, np.nan, reason or "its folder holds no finished run"
    column, found = parse(metric).column, value(run, metric)
    if found is not None:
        return TrialState.COMPLETE, found, ""
    if not {column, column.rpartition("/")[0]} & {*run.summary, *run.metrics}:
        known = ", ".join([*run.summary, *(f"last:{column}" for column in run.metrics)])
        raise ValueError(f"optimized_metric={metric} is not among what runs measure: {known}.")
    return TrialState.PRUNED, np.nan, f"{metric} was not reached, or is not finite"


def write(study: optuna.Study, root: Path) -> None:
    """``trials.csv``, a row a trial, and the best one in ``optimization_results.yaml``."""
    table = study.trials_dataframe(("number", "state", "value", "duration", "params", "user_attrs"))
    table.columns = [name.removeprefix("params_").removeprefix("user_attrs_") for name in table.columns]
    table["state"] = table["state"].str.lower()
    table["duration"] = table["duration"].dt.total_seconds().round(1)
    table.insert(4, "folder", [name_of(trial) for trial in study.trials])
    with replacing(root / "trials.csv") as temporary:
        table.rename(columns={"duration": "seconds"}).to_csv(temporary, index=False)
    if best(study):
        top = study.best_trial
        found = {"best_params": top.params, "best_value": top.value, "best_trial": top.number, "folder": name_of(top)}
        found |= {key: study.user_attrs["fixed"][key] for key in ("metric", "direction")}
        with replacing(root / "optimization_results.yaml") as temporary:
            temporary.write_text(yaml.safe_dump({"name": "optuna"} | found, sort_keys=False))


def best(study: optuna.Study) -> str:
    found = study.get_trials(states=(TrialState.COMPLETE,))
    return f"; best {study.best_value:.4g} with {describe(study.best_trial)}" if found else ""


def name_of(trial: Trial | FrozenTrial) -> str:
    return f"trial_{trial.number:04d}"


def describe(trial: Trial | FrozenTrial) -> str:
    params = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in trial.params.items())
    return f"{name_of(trial)} ({' '.join(params)})"
