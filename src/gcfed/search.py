"""Searches with Optuna: their spaces, studies and trials.

A sweep (``hydra_plugins/gcfed_optuna.py``) and the search of a table share them. Optuna is an
extra, so functions import it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.utils import instantiate
from omegaconf import DictConfig

from gcfed.folders.folder import RESULTS, STORAGE, TRIALS
from gcfed.folders.identity import differences, leaves
from gcfed.folders.lock import locked
from gcfed.utils.files import replacing, write_text
from gcfed.utils.refusal import Refusal


@contextmanager
def locked_search(folder: Path, remedy: str) -> Iterator[None]:
    """Locks a search's folder. Raises Refusal, with a remedy, if another process has it."""
    with locked(folder / ".lock") as holder:
        if holder:
            raise Refusal(f"{holder} is at the search in {folder}: {remedy}.")
        yield


def number_of_ended(study: Any) -> int:
    """How many trials have ended, with or without a value."""
    return sum(trial.state.is_finished() for trial in study.trials)


def folder_name(trial: Any) -> str:
    return f"trial_{trial.number:04d}"


def open_study(
    root: Path,
    cfg: DictConfig,
    space: Mapping[str, Any],
    metric: str,
    direction: str,
    *,
    remedy: str,
    storage: Any = None,
) -> Any:
    """Opens the search in a folder, or starts one.

    Raises Refusal, with a remedy, if its config, space or metric differs.
    """
    import optuna

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
    # until a trial has ended, the metric may be a typo
    if not number_of_ended(study):
        study.set_user_attr("fixed", fixed)
    differing = differences(study.user_attrs["fixed"], fixed)
    if differing:
        raise Refusal(f"{root} holds another search: {differing}. {remedy}.")
    return study


def next_trial(study: Any, space: Mapping[str, Any], sampler: Any, seed: int, skip: int = 0) -> Any:
    """An unfinished trial of a stopped search, or a new one.

    Its draws depend only on the trials before it.
    """
    from optuna.trial import Trial

    left = [trial for trial in study.trials if trial.state.name == "RUNNING"][skip:]
    index = left[0].number if left else len(study.trials)
    (state,) = np.random.SeedSequence([seed, index]).generate_state(1)
    study.sampler = instantiate(sampler, seed=int(state))
    trial = Trial(study, left[0]._trial_id) if left else study.ask()
    for name, distribution in space.items():
        trial._suggest(name, distribution)
    return trial


def write_trials(study: Any, root: Path, metric: str) -> None:
    """Writes ``trials.csv``, one row per trial, and the best trial to
    ``optimization_results.yaml``.
    """
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


def possible_draw(space: Mapping[str, Any]) -> list[str]:
    """The overrides of a trial that the space allows, to check a search before it begins."""
    overrides = []
    for key, distribution in space.items():
        choices = getattr(distribution, "choices", None)
        value = distribution.low if choices is None else choices[0]
        overrides.append(f"{key}={value}")
    return overrides


def has_choices(space: Mapping[str, Any]) -> bool:
    """Whether trials choose among options, beside some of which another key may have no effect."""
    return any(hasattr(distribution, "choices") for distribution in space.values())


def overrides_of(trial: Any) -> list[str]:
    """The overrides of the values that a trial has drawn."""
    return [f"{key}={value}" for key, value in trial.params.items()]


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
