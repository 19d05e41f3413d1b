"""A search with Optuna as a sweep: ``python src/train.py -m hparams_search=<name>``, one run per
trial.

Hydra imports this file at every start, so heavy packages are imported in functions. All plugins
share the folder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper
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
        """Raises Refusal before any run if a setting cannot work or the folder holds another
        search.
        """
        from gcfed import search
        from gcfed.assemble import check_buildable, declared_result  # torch
        from gcfed.folders.measures import check_direction, check_judges, parse
        from gcfed.utils.checked import Count, validated
        from gcfed.utils.idle import refuse_idle

        validated("hydra.sweeper.n_trials", self.n_trials, Count)
        validated("hydra.sweeper.n_jobs", self.n_jobs, Count)
        metric = self.cfg.optimized_metric
        root = Path(self.cfg.hydra.sweep.dir).absolute()
        measure = parse(metric or "", "optimized_metric")
        check_direction(metric, self.direction, "optimized_metric", "hydra.sweeper.direction")
        params = [f"{key}={words}" for key, words in self.params.items()]
        space, common = search.space_of([*params, *arguments])
        if not space or "seed" in space:
            raise Refusal(
                "A search needs hydra.sweeper.params, such as 'gc.lam=interval(0.0, 1.0)', without"
                " seed."
            )
        cfg = self.load(self.cfg, common)
        words = [*common, *search.possible_draw(space)]
        possible = self.load(self.cfg, words)
        if not search.has_choices(space):
            refuse_idle(possible, words, searches=True)
        with open_dict(possible):
            possible.pop("hydra", None)
            possible.paths.output_dir = str(root)
        check_buildable(possible).require_measure(metric, f"optimized_metric={metric}")
        check_judges(measure.column, declared_result(cfg), f"optimized_metric={metric}")
        with search.locked_search(root, "one process does it, n_jobs trials at once"):
            study = search.open_study(
                root,
                cfg,
                space,
                metric,
                self.direction,
                remedy="Take another folder, hydra.sweep.dir=<folder>",
                storage=self.storage,
            )
            left = self.n_trials - search.number_of_ended(study)
            while left > 0:
                trials = []
                for i in range(min(self.n_jobs, left)):
                    trials.append(search.next_trial(study, space, self.sampler, self.seed, i))
                self.run(study, trials, common, root)
                left = self.n_trials - search.number_of_ended(study)
        failed = []
        for trial in study.trials:
            if trial.state.name == "FAIL":
                failed.append(f"{search.folder_name(trial)}: {trial.user_attrs['reason']}")
        if failed:
            raise SystemExit("\n".join(failed))
        if all(trial.value is None for trial in study.trials):
            raise SystemExit(f"No trial has a value, as {root}/trials.csv says.")

    def run(self, study: Any, trials: Sequence[Any], common: Sequence[str], root: Path) -> None:
        """Launches the runs of these trials together, and reports their values to Optuna."""
        from optuna.trial import TrialState

        from gcfed import search
        from gcfed.folders.folder import CHECKPOINT, read_run
        from gcfed.folders.measures import check_judges, parse
        from gcfed.utils.compose import quoted

        metric = self.cfg.optimized_metric
        measure = parse(metric)
        folders = [root / search.folder_name(trial) for trial in trials]
        calls = []
        for trial, folder in zip(trials, folders, strict=True):
            place = [f"hydra.sweep.dir={quoted(root)}", f"hydra.sweep.subdir={folder.name}"]
            if (folder / CHECKPOINT).is_file():
                place.append(f"ckpt_path={quoted(folder / CHECKPOINT)}")
            calls.append([*common, *search.overrides_of(trial), *place])
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
            search.write_trials(study, root, metric)
