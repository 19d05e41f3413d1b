"""A study whose cells are tuned before they are compared: a search each, all with the same number of trials."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from gcfed.runs.reading import mapping, read_yaml
from gcfed.study.jobs import Job, check_parts
from gcfed.utils.resolvers import CONFIGS
from gcfed.utils.words import say

SEARCHES = "searches"  # the folder of a study's searches
SETTINGS, OPTIONAL = {"metric", "n_trials", "params", "knobs", "overrides"}, {"n_jobs", "direction", "seeds"}


def check_search(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What each search gets of ``study.search``, beside its params; refuses settings that are not as they must be.

    Raises:
        ValueError: names the key.
    """
    from gcfed.study.space import check_metric, check_settings, read_space

    if odd := ({*settings} - OPTIONAL) ^ SETTINGS:
        known = ", ".join(sorted(SETTINGS | OPTIONAL))
        raise ValueError(f"study.search: {min(odd)} is missing or unknown; it has {known}.")
    check_metric("study.search.metric", settings["metric"])
    fixed = yaml.safe_load((CONFIGS / "hydra" / "sweeper" / "optuna.yaml").read_text(encoding="utf-8"))
    fixed = {key: value for key, value in fixed.items() if not key.startswith("_")}
    fixed |= {key: settings[key] for key in ("n_trials", *OPTIONAL) if key in settings}
    check_settings("study.search", **fixed | {"params": settings["params"]})
    check_parts("study.search", {"overrides": settings["overrides"]})
    if not isinstance(knobs := settings["knobs"], Mapping):
        raise ValueError(f"study.search.knobs={knobs} must be a group: override → further params.")
    for override, more in knobs.items():
        read_space(more, [], f"study.search.knobs.{override}")
    return fixed


def tune(
    jobs: Sequence[Job],
    settings: Mapping[str, Any],
    root: Path,
    config: Any,
    context: Any,
    launcher: Any,
    *,
    dry_run: bool = False,
) -> list[Job]:
    """Gives the jobs of each cell the best that a search of its own found; one that was stopped goes on.

    Args:
        jobs: those of the study.
        settings: ``study.search``: the ``metric``, its ``direction`` (maximize) and ``n_trials`` of each search,
            ``n_jobs`` of them at once (1), the ``seeds`` of a trial's runs (the one of ``overrides``); its
            ``params``, in the words of ``configs/hydra/sweeper/optuna.yaml``; ``knobs``, override → further params
            of the cells that have it; and ``overrides`` of the trials: a validation split, and a seed that no job has.
        root: folder of the study; its searches lie in ``searches/<row>_<column>``.
        dry_run: search for nothing; take what was found.

    Raises:
        ValueError: words that cannot be searched, before any search; or no trial of a search has a value.
    """
    from gcfed.study.search import search  # Optuna, an extra; a trial that fails is one of the budget

    fixed = check_search(settings)
    cells = {job.cell: job for job in jobs}  # of any seed, which a search has of its own
    params = {cell: dict(settings["params"]) for cell in cells}
    for override, more in settings["knobs"].items():
        having = [cell for cell, job in cells.items() if override in job.overrides]
        for cell in having:
            params[cell] |= more
        if not having:
            say(f"no job has {override}: study.search.knobs has {', '.join(more)} for nothing")
    if dry_run:
        n_trials = settings["n_trials"]
        say(f"{len(cells)} searches of {n_trials} trials each, unless they have ended; below, the runs")
    found: dict[str, list[str]] = {}
    for cell, job in cells.items():
        folder = root / SEARCHES / cell
        own = {"hydra": {"sweep": {"dir": str(folder)}}, "optimized_metric": settings["metric"]}
        common = [override for override in job.overrides if not override.startswith("seed=")]
        if not dry_run:
            say(f"search for {job.title.rpartition(', seed')[0]}")
            search(
                OmegaConf.merge(config, own), context, launcher, [*common, *(settings["overrides"] or ())],
                **fixed | {"params": params[cell]},
            )  # fmt: skip
        if not (results := folder / "optimization_results.yaml").is_file():
            if dry_run:
                found[cell] = []  # to be searched for
                continue
            raise ValueError(f"No trial of {folder} has a value; its trials.csv says why. study.rows leaves it out.")
        best = mapping(f"{results}: best_params", read_yaml(results).get("best_params"))
        found[cell] = [f"{key}={value}" for key, value in best.items()]
    return [job._replace(overrides=[*job.overrides, *found[job.cell]]) for job in jobs]
