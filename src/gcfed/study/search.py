"""A search with Optuna as a sweep: Hydra's launcher makes the runs, Optuna's storage keeps the trials."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from omegaconf import OmegaConf

from gcfed.runs.folder import CONFIG, RESULTS, STORAGE, TRIALS, Run, read_run
from gcfed.runs.identity import differences, leaves
from gcfed.runs.measures import parse, value
from gcfed.study.jobs import launch, settings_of
from gcfed.utils.files import locked, replacing
from gcfed.utils.resolvers import how_to_install
from gcfed.utils.words import say

try:
    import optuna
    from optuna.trial import FrozenTrial, Trial, TrialState

    from gcfed.study.space import Settings, read_space, sampler_of
except ImportError as error:
    raise ValueError(f"A search needs Optuna, which is an extra: {how_to_install('optuna')} ({error})") from error

log = logging.getLogger(__name__)
optuna.logging.set_verbosity(optuna.logging.WARNING)
RISE = 1000.0  # of a loss that was past the edge of what can be trained
LOST = {"train/nonfinite_clients": "client updates left out", "train/refused_steps": "server steps taken back"}


def search(config: Any, context: Any, launcher: Any, arguments: list[str], **settings: Any) -> bool:
    """Runs trials until ``n_trials`` have ended; the same command continues a search that was stopped.

    A trial's value is the mean over its runs, one a seed. One with a run that fails, or that has no finite value
    ("pruned"), counts and keeps its reason, as in Optuna's own loop; so does one that is refused (:func:`edges`).

    Returns whether a trial has a value, and none failed. It raises ValueError of settings (those of
    ``configs/hydra/sweeper/optuna.yaml``) that cannot work, another search in the folder, or a metric that no run has.
    """
    known: Settings = settings_of("hydra.sweeper", Settings, OmegaConf.to_container(OmegaConf.create(settings)))
    going = Search(config, context, launcher, arguments, known)
    with locked(going.root / ".lock") as holder:
        if holder:
            raise ValueError(f"{holder} is at the search in {going.root}: one process does it, n_jobs trials at once.")
        going.open()
        while trials := going.draw():
            going.run(trials)
        going.write()  # also where the last trial's was lost
    states = [state_of(trial) for trial in going.study.trials]
    ends = f"{states.count('fail')} failed, {states.count('refused')} refused"
    say(f"search in {going.root}: {going.ended} trials, {ends}{going.best_so_far or '; none has a value'}")
    return best(going.study) is not None and "fail" not in states


class Outcome(NamedTuple):
    """What became of a run: the state of a trial of it alone, its value, and why it has none or is refused."""

    state: TrialState
    value: float = np.nan
    why: str = ""
    edges: Mapping[str, tuple[float, str]] = {}


class Search:
    """What a search draws, and by what; what all its runs share; and once it is open, Optuna's study of its trials."""

    study: optuna.Study

    def __init__(self, config: Any, context: Any, launcher: Any, arguments: list[str], settings: Settings) -> None:
        self.settings, self.launcher, self.metric = settings, launcher, config.optimized_metric
        self.root, self.seeds = Path(config.hydra.sweep.dir).absolute(), settings.seeds or []
        _, higher = parse(self.metric or "", "optimized_metric").kind
        self.space, common = read_space(settings.params, [a for a in arguments if a != "ckpt_path=last"])
        if "seed" in self.space:
            raise ValueError("seed would be searched: for several seeds a trial take 'hydra.sweeper.seeds=[1,2,3]'.")
        if not self.space:
            raise ValueError("A search needs hydra.sweeper.params, such as 'gc.lam=interval(0.0, 1.0)'.")
        if settings.direction == "maximize" and higher is False:
            raise ValueError(
                f"{self.metric} is better where it is smaller: set hydra.sweeper.direction=minimize "
                "(of a tuned study +study.search.direction=minimize)."
            )
        cfg = context.config_loader.load_sweep_config(config, common)
        searched = tuple(f"{name}." for name in self.space)
        #: What all trials have in common, by which the search is known again.
        self.fixed = {key: value for key, value in leaves(cfg).items() if not f"{key}.".startswith(searched)}
        self.fixed |= {"rounds": cfg.rounds, "eval_every": cfg.eval_every}
        ends = OmegaConf.select(cfg, "callbacks.early_stopping") or {}
        self.fixed |= {f"callbacks.early_stopping.{key}": value for key, value in ends.items()}
        self.fixed |= {"metric": self.metric, "direction": settings.direction}
        self.fixed |= {f"params.{key}": repr(distribution) for key, distribution in self.space.items()}
        if self.seeds:
            self.fixed["seed"] = [*self.seeds]
        self.common = [override for override in common if not (self.seeds and override.startswith("seed="))]

    def open(self) -> None:
        """Finds the search that lies in the storage, or begins one there; ValueError if it is another one."""
        kept = self.settings.storage
        address, name = kept or f"sqlite:///{self.root}/{STORAGE}", self.root.name if kept else "search"
        try:
            self.study = optuna.create_study(
                storage=address, study_name=name, direction=self.settings.direction, load_if_exists=True
            )
        except Exception as error:  # SQLAlchemy's, a driver's, Optuna's own
            reason = str(error).splitlines()[0]
            raise ValueError(f"hydra.sweeper.storage={address} cannot be opened: {reason}") from error
        known = self.study.user_attrs.get("fixed", self.fixed)
        if not self.ended:
            known |= {"metric": self.metric}  # one that runs do not have ended the search; another may take its place
        if odd := differences(known, self.fixed):
            raise ValueError(f"{self.root} holds another search: {odd}. Take another folder, hydra.sweep.dir=<folder>.")
        self.study.set_user_attr("fixed", self.fixed)

    @property
    def ended(self) -> int:
        return sum(trial.state.is_finished() for trial in self.study.trials)

    @property
    def best_so_far(self) -> str:
        top = best(self.study)
        return f"; best {top.value:.4g} with {describe(top)}" if top else ""

    def draw(self) -> list[Trial]:
        """The next trials, at most ``n_jobs``: first what a stopped search left behind; none when it has ended."""
        wanted = min(self.settings.n_jobs, self.settings.n_trials - self.ended)
        left = [t for t in self.study.trials if not t.state.is_finished()] if wanted > 0 else []
        trials = []
        for t in left[: self.settings.n_jobs]:
            self._seed(t.number)
            trials.append(Trial(self.study, t._trial_id))
            for name, distribution in self.space.items():  # the search may have been stopped before all were drawn
                trials[-1]._suggest(name, distribution)
        while len(trials) < wanted:
            index = len(self.study.trials)
            folder = self.root / f"trial_{index:04d}"
            if folder.exists():  # what it holds is of other draws
                raise ValueError(f"The storage does not know of {folder}: move the folder away, or take another one.")
            self._seed(index)
            trials.append(self.study.ask(self.space))
        return trials

    def _seed(self, index: int) -> None:
        """What a trial draws depends on the seed and the trials before it, not on a restart."""
        draw = np.random.SeedSequence([self.settings.seed, index]).generate_state(1)
        self.study.sampler = sampler_of(self.settings.sampler, int(draw[0]))

    def run(self, trials: list[Trial]) -> None:
        """Launches all runs of these trials at once, and tells Optuna what became of them."""
        runs: list[tuple[Trial, list[str], Path]] = []
        for trial in trials:
            say(f"trial {trial.number + 1} of {self.settings.n_trials}: {describe(trial)}{self.best_so_far}")
            folder = self.root / name_of(trial)
            overrides = [*self.common, *(f"{key}={drawn}" for key, drawn in trial.params.items())]
            seeded = [(trial, [*overrides, f"seed={seed}"], folder / f"seed_{seed}") for seed in self.seeds]
            runs += seeded or [(trial, overrides, folder)]
        first = trials[0].number * (len(self.seeds) or 1)
        reasons = launch(self.launcher, [(overrides, folder) for _, overrides, folder in runs], first)
        for trial in trials:
            ended = [(folder, why) for (of, _, folder), why in zip(runs, reasons, strict=True) if of is trial]
            self.tell(trial, {folder.name: outcome(folder, self.metric, why) for folder, why in ended})
            self.write()

    def tell(self, trial: Trial, runs: Mapping[str, Outcome]) -> None:
        """The trial's value, the mean over its runs, or why it has none or is refused."""
        states = {run.state for run in runs.values()}
        state = next(s for s in (TrialState.FAIL, TrialState.PRUNED, TrialState.COMPLETE) if s in states)
        whys = {name: run.why for name, run in runs.items() if run.state == state and run.why}
        is_whole = state == TrialState.COMPLETE
        if reason := "; ".join(f"{name}: {why}" if len(runs) > 1 else why for name, why in whys.items()):
            trial.set_user_attr("reason", reason)
            log.error("%s %s: %s", name_of(trial), "refused" if is_whole else state.name.lower(), reason)
        if is_whole:  # a constraint of each trial: some samplers want as many of all
            trial.set_constraint("edges", sum(how_far for run in runs.values() for how_far, _ in run.edges.values()))
        self.study.tell(trial, float(np.mean([run.value for run in runs.values()])) if is_whole else None, state)

    def write(self) -> None:
        """``trials.csv``, a row a trial, and the best one in ``optimization_results.yaml``."""
        trials = self.study.trials
        table = self.study.trials_dataframe(("number", "state", "value", "duration", "params", "user_attrs"))
        table.columns = [name.removeprefix("params_").removeprefix("user_attrs_") for name in table.columns]
        table["state"] = [state_of(trial) for trial in trials]
        table["value"] = table["value"].where(table["state"] != "refused")  # or it might look like the best
        table["duration"] = table["duration"].dt.total_seconds().round(1)
        table.insert(4, "folder", [name_of(trial) for trial in trials])
        with replacing(self.root / TRIALS) as temporary:
            table.rename(columns={"duration": "seconds"}).to_csv(temporary, index=False)
        if top := best(self.study):
            found: dict[str, Any] = {"best_params": top.params, "best_value": top.value, "best_trial": top.number}
            found |= {"folder": name_of(top), "metric": self.metric, "direction": self.study.direction.name.lower()}
            with replacing(self.root / RESULTS) as temporary:
                temporary.write_text(yaml.safe_dump({"name": "optuna"} | found, sort_keys=False))


def outcome(folder: Path, metric: str, reason: str) -> Outcome:
    """Reads a trial's run; ``reason`` is the launcher's word on why it failed, or "". ValueError ends the search."""
    if not ((folder / CONFIG).is_file() and (run := read_run(folder)).has_ended):
        return Outcome(TrialState.FAIL, why=reason or "its folder holds no finished run")
    column, found = parse(metric).column, value(run, metric)
    if found is not None:
        past = edges(run)
        return Outcome(TrialState.COMPLETE, found, "; ".join(words for _, words in past.values()), past)
    if not {column, column.rpartition("/")[0]} & {*run.summary, *run.metrics}:
        known = ", ".join([*run.summary, *(f"last:{column}" for column in run.metrics)])
        raise ValueError(f"optimized_metric={metric} is not among what runs measure: {known}.")
    return Outcome(TrialState.PRUNED, why=f"{metric} was not reached, or is not finite")


def edges(run: Run) -> dict[str, tuple[float, str]]:
    """Where a run was past the edge of what can be trained: column → (how far, above 0; in words).

    Updates were left out, server steps taken back, or a loss was in some round a thousand times what it had been, and
    above its first round's; of a loss that is negative it cannot be said. To Optuna how far is a constraint: a trial
    that violates it is never the best, and samplers that know constraints learn to avoid it.
    """
    found = {}
    for column, what in LOST.items():
        if count := run.curve(column).sum():
            found[column] = float(count), f"{count:g} {what}"
    for column in ("train/loss", "test/loss"):
        curve = run.curve(column)
        least = curve.cummin().shift()  # of the rounds before
        past = curve[(least >= 0) & (curve >= RISE * least) & (curve > curve.head(1).sum())]
        if len(past):
            t = past.idxmax()
            words = f"{column} rose from {least[t]:.3g} to {curve[t]:.3g} in round {t}"
            found[column] = float(np.log10(min(curve[t] / least[t], 1e30))), words
    return found


def best(study: optuna.Study) -> FrozenTrial | None:
    """None where no trial has a value, or all that have one were refused."""
    try:
        return study.best_trial
    except ValueError:
        return None


def state_of(trial: FrozenTrial) -> str:
    """Optuna's word, or ``refused`` where a constraint is violated."""
    return "refused" if any(how_far > 0 for how_far in trial.constraints.values()) else trial.state.name.lower()


def name_of(trial: Trial | FrozenTrial) -> str:
    return f"trial_{trial.number:04d}"


def describe(trial: Trial | FrozenTrial) -> str:
    params = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in trial.params.items())
    return f"{name_of(trial)} ({' '.join(params)})"
