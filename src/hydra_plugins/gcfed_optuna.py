"""A search with Optuna as a sweep: ``python src/train.py -m hparams_search=<name>``, one run per
trial.

Hydra imports this file at every start, so heavy packages are imported in functions. All plugins
share the folder.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.utils import instantiate
from omegaconf import open_dict

from gcfed.utils.refusal import Refusal, message_of


class OptunaSweeper(Sweeper):
    """Runs trials until ``n_trials`` have ended, with or without a value.

    The same command continues a search.
    """

    def __init__(
        self,
        direction: str,
        n_trials: int,
        n_jobs: int,
        seed: int,
        storage: Any,
        sampler: Any,
        params: Any,
    ):
        self.direction = direction
        self.n_trials = n_trials
        self.n_jobs = n_jobs
        self.seed = seed
        self.storage = storage
        self.sampler = sampler
        self.params = params

    def setup(self, **command: Any) -> None:
        self.cfg = command["config"]
        self.load = command["hydra_context"].config_loader.load_sweep_config
        self.launch = Plugins.instance().instantiate_launcher(**command).launch

    def sweep(self, arguments: list[str]) -> None:
        """Raises ValueError before any run if a setting cannot work or the folder holds another
        search.
        """
        from gcfed.folders.lock import locked
        from gcfed.folders.measures import check_direction, check_judges, parse

        metric = self.cfg.optimized_metric
        root = Path(self.cfg.hydra.sweep.dir).absolute()
        measure = parse(metric or "", "optimized_metric")
        check_direction(metric, self.direction, "optimized_metric", "hydra.sweeper.direction")
        params = [f"{key}={words}" for key, words in self.params.items()]
        space, common = space_of([*params, *arguments])
        if not space or "seed" in space:
            raise Refusal(
                "A search needs hydra.sweeper.params, such as 'gc.lam=interval(0.0, 1.0)', without"
                " seed."
            )
        cfg = self.load(self.cfg, common)
        drawn = [f"{key}={some_value(distribution)}" for key, distribution in space.items()]
        trial = self.load(self.cfg, [*common, *drawn])
        if "task" in trial:
            from gcfed.assemble import check_buildable  # torch

            with open_dict(trial):
                trial.pop("hydra", None)
                trial.paths.output_dir = str(root)
            check_buildable(trial).require_measure(metric, f"optimized_metric={metric}")
        if "methods" in cfg:
            from gcfed.assemble import declared_result

            result = declared_result(cfg)
            check_judges(measure.column, result, f"optimized_metric={metric}")
        with locked(root / ".lock") as holder:
            if holder:
                raise Refusal(
                    f"{holder} is at the search in {root}: one process does it, n_jobs trials at"
                    " once."
                )
            study = open_study(root, cfg, space, metric, self.direction, self.storage)
            left = self.n_trials - number_of_ended(study)
            while left > 0:
                trials = []
                for i in range(min(self.n_jobs, left)):
                    trials.append(next_trial(study, space, self.sampler, self.seed, i))
                self.run(study, trials, common, root)
                left = self.n_trials - number_of_ended(study)
        failed = []
        for trial in study.trials:
            if trial.state.name == "FAIL":
                failed.append(f"{folder_name(trial)}: {trial.user_attrs['reason']}")
        if failed:
            raise SystemExit("\n".join(failed))
        if all(trial.value is None for trial in study.trials):
            raise SystemExit(f"No trial has a value, as {root}/trials.csv says.")

    def run(self, study: Any, trials: Sequence[Any], common: Sequence[str], root: Path) -> None:
        """Launches the runs of these trials together, and reports their values to Optuna."""
        from optuna.trial import TrialState

        from gcfed.folders.folder import CHECKPOINT, read_run
        from gcfed.folders.measures import check_judges, parse
        from gcfed.utils.compose import quoted

        metric = self.cfg.optimized_metric
        measure = parse(metric)
        folders = [root / folder_name(trial) for trial in trials]
        calls = []
        for trial, folder in zip(trials, folders, strict=True):
            params = [f"{key}={drawn}" for key, drawn in trial.params.items()]
            place = [f"hydra.sweep.dir={quoted(root)}", f"hydra.sweep.subdir={folder.name}"]
            if (folder / CHECKPOINT).is_file():
                place.append(f"ckpt_path={quoted(folder / CHECKPOINT)}")
            calls.append([*common, *params, *place])
        jobs = self.launch(calls, initial_job_idx=trials[0].number)
        for trial, folder, job in zip(trials, folders, jobs, strict=True):
            run = read_run(folder)
            number = measure.of(run) if run.has_ended else None
            if number is None:
                error = job._return_value if job.status == JobStatus.FAILED else run.reason
                trial.set_user_attr("reason", message_of(error) or f"{metric} has no finite value")
            check_judges(measure.column, run.result, f"optimized_metric={metric}")
            if run.has_ended and measure.statistic and measure.column not in run.metrics:
                known = ", ".join(sorted(run.metrics))
                raise Refusal(f"optimized_metric={metric} is not among what runs measure: {known}.")
            lost = TrialState.PRUNED if run.has_ended else TrialState.FAIL
            study.tell(trial, number, lost if number is None else TrialState.COMPLETE)
            write(study, root, metric)


def number_of_ended(study: Any) -> int:
    """How many trials have ended, with or without a value."""
    return sum(trial.state.is_finished() for trial in study.trials)


def folder_name(trial: Any) -> str:
    return f"trial_{trial.number:04d}"


def open_study(
    root: Path, cfg: Any, space: Mapping[str, Any], metric: str, direction: str, storage: Any = None
) -> Any:
    """Opens the search in a folder, or starts one.

    Raises ValueError if its config, space or metric differs.
    """
    import optuna

    from gcfed.folders.folder import STORAGE
    from gcfed.folders.identity import differences, leaves

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    searched = tuple(f"{key}." for key in space)
    fixed = {key: value for key, value in leaves(cfg).items() if not f"{key}.".startswith(searched)}
    fixed |= {"rounds": cfg.rounds, "metric": metric, "direction": direction}
    fixed |= {f"params.{key}": repr(distribution) for key, distribution in space.items()}
    where: Any = {
        "storage": storage or f"sqlite:///{root}/{STORAGE}",
        "study_name": root.name if storage else "search",
    }
    study = optuna.create_study(**where, direction=direction, load_if_exists=True)  # type: ignore[arg-type]
    # else its metric may have been a typo
    differing = ""
    if number_of_ended(study):
        differing = differences(study.user_attrs["fixed"], fixed)
    if differing:
        raise Refusal(
            f"{root} holds another search: {differing}. Take another folder,"
            " hydra.sweep.dir=<folder>."
        )
    study.set_user_attr("fixed", fixed)
    return study


def next_trial(study: Any, space: Mapping[str, Any], sampler: Any, seed: int, skip: int = 0) -> Any:
    """An unfinished trial of a stopped search, or a new one.

    Its draws depend only on the trials before it.
    """
    import numpy as np
    from optuna.trial import Trial

    left = [trial for trial in study.trials if trial.state.name == "RUNNING"][skip:]
    index = left[0].number if left else len(study.trials)
    (state,) = np.random.SeedSequence([seed, index]).generate_state(1)
    study.sampler = instantiate(sampler, seed=int(state))
    trial = Trial(study, left[0]._trial_id) if left else study.ask()
    for name, distribution in space.items():
        trial._suggest(name, distribution)
    return trial


def write(study: Any, root: Path, metric: str) -> None:
    """Writes ``trials.csv``, one row per trial, and the best trial to
    ``optimization_results.yaml``.
    """
    from gcfed.folders.folder import RESULTS, TRIALS
    from gcfed.utils.files import replacing, write_text

    table = study.trials_dataframe(("number", "state", "value", "params", "user_attrs"))
    table.columns = table.columns.str.removeprefix("params_").str.removeprefix("user_attrs_")
    refused = [max(trial.constraints.values(), default=0) > 0 for trial in study.trials]
    table["state"] = table["state"].str.lower().mask(refused, "refused")
    table["value"] = table["value"].mask(refused)
    with replacing(root / TRIALS) as temporary:
        table.to_csv(temporary, index=False)
    if table["value"].notna().any():
        best = study.best_trial
        results = {
            "name": "optuna",
            "best_params": best.params,
            "best_value": best.value,
            "best_trial": best.number,
            "metric": metric,
            "direction": study.direction.name.lower(),
        }
        write_text(root / RESULTS, yaml.safe_dump(results, sort_keys=False))


def space_of(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Optuna's distributions for Hydra's ``interval()``, ``range()`` and ``choice()``; the
    overrides of all trials.
    """
    drawn_or_text: dict[str, Any] = {}
    for text in overrides:
        if text == "ckpt_path=last":
            continue
        try:
            override = OverridesParser.create().parse_override(text)
            key = override.get_key_element()
            drawn_or_text.pop(key, None)  # the last one of a key takes its place in the order
            drawn_or_text[key] = text
            if override.is_sweep_override():
                drawn_or_text[key] = _distribution(override)
        except Exception as error:
            raise Refusal(f"{text} cannot be searched: {str(error).splitlines()[0]}") from None
    space = {key: drawn for key, drawn in drawn_or_text.items() if not isinstance(drawn, str)}
    return space, [text for text in drawn_or_text.values() if isinstance(text, str)]


def some_value(distribution: Any) -> Any:
    """A value that a trial may draw."""
    choices = getattr(distribution, "choices", None)
    return distribution.low if choices is None else choices[0]


def _distribution(override: Override) -> Any:
    """Optuna's distribution for an override with a sweep."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep: Any = override.value()
    is_interval = isinstance(sweep, IntervalSweep)
    unknown = sweep.tags - {"log"} if is_interval else sweep.tags
    if unknown:
        raise Refusal(f"tag({min(unknown)}, …) is known for intervals alone, and as log")
    if is_interval:
        ends = [sweep.start, sweep.end]
        rest: dict[str, Any] = {"log": "log" in sweep.tags}
    elif isinstance(sweep, RangeSweep):
        ends = list(sweep.range())
        rest = {"step": sweep.step}
    else:
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    are_whole = isinstance(ends[0], int) and isinstance(ends[-1], int)
    kind: Any = IntDistribution if are_whole else FloatDistribution
    return kind(ends[0], ends[-1], **rest)
