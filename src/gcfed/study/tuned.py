"""A study whose cells are tuned before they are compared: a search each, all with the same number of trials."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gcfed.runs.reading import mapping, read_yaml
from gcfed.study.jobs import Job
from gcfed.utils.words import say

SEARCHES = "searches"  # the folder of a study's searches


def tune(
    jobs: Sequence[Job], node: Any, root: Path, config: Any, context: Any, launcher: Any, *, dry_run: bool = False
) -> list[Job]:
    """Gives the jobs of each cell the best that a search of its own found; one that was stopped goes on.

    Args:
        jobs: those of the study.
        node: ``study.search``, see :class:`gcfed.study.space.Tuning`.
        root: folder of the study; its searches lie in ``searches/<row>_<column>``.
        dry_run: search for nothing; take what was found.

    Raises:
        ValueError: words that cannot be searched, before any search; or no trial of a search has a value.
    """
    from gcfed.study.search import search  # Optuna, an extra; a trial that fails is one of the budget
    from gcfed.study.space import Settings, read_tuning

    tuning = read_tuning(node)
    own = {field.name: getattr(tuning, field.name) for field in fields(Settings)}
    cells = {job.cell: job for job in jobs}  # of any seed, which a search has of its own
    params = {cell: dict(tuning.params) for cell in cells}
    for override, more in tuning.knobs.items():
        having = [cell for cell, job in cells.items() if override in job.overrides]
        for cell in having:
            params[cell] |= more
        if not having:
            say(f"no job has {override}: study.search.knobs has {', '.join(more)} for nothing")
    if dry_run:
        say(f"{len(cells)} searches of {tuning.n_trials} trials each, unless they have ended; below, the runs")
    found: dict[str, list[str]] = {}
    for cell, job in cells.items():
        folder = root / SEARCHES / cell
        place = OmegaConf.merge(config, {"hydra": {"sweep": {"dir": str(folder)}}, "optimized_metric": tuning.metric})
        common = [override for override in job.overrides if not override.startswith("seed=")]
        if not dry_run:
            say(f"search for {job.title.rpartition(', seed')[0]}")
            overrides = [*common, *(tuning.overrides or ())]
            search(place, context, launcher, overrides, **own | {"params": params[cell]})
        results = folder / "optimization_results.yaml"
        if not (results.is_file() or dry_run):
            raise ValueError(f"No trial of {folder} has a value; its trials.csv says why. study.rows leaves it out.")
        best = mapping(f"{results}: best_params", read_yaml(results).get("best_params")) if results.is_file() else {}
        found[cell] = [f"{key}={value}" for key, value in best.items()]
    return [job._replace(overrides=[*job.overrides, *found[job.cell]]) for job in jobs]
