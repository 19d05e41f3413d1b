"""What a search draws, and by what: Optuna's words out of Hydra's, and the settings that cannot work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from gcfed.runs.measures import parse
from gcfed.study.jobs import Seeds, different
from gcfed.utils.checked import Count, SettingError, Whole, checked
from gcfed.utils.instantiate import require
from gcfed.utils.number import number, word

Space = dict[str, BaseDistribution]


@checked
@dataclass(frozen=True)
class Settings:
    """Those of ``configs/hydra/sweeper/optuna.yaml``, which says what they are."""

    direction: Literal["maximize", "minimize"]
    n_trials: Count
    n_jobs: Count
    seed: Whole
    seeds: Seeds
    storage: str | None
    sampler: Any
    params: Any

    def __post_init__(self) -> None:
        different("seeds", self.seeds)
        if self.storage == "":
            raise SettingError("storage", "='' must be an address such as sqlite:///search.db, or null.")
        space, made = read_space(self.params, [], "params")[0], sampler_of(self.sampler, 0)
        try:
            optuna.create_study(sampler=made).ask(space)
        except Exception as error:  # some samplers look at their settings only now
            raise SettingError("sampler", f" cannot draw from these params: {error}") from error


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
    tree = OmegaConf.create({"hydra": {"sweeper": {"sampler": node}}})  # an error names the key
    made = require(tree.hydra.sweeper, "sampler", seed=seed)
    if not isinstance(made, optuna.samplers.BaseSampler):
        raise ValueError(f"hydra.sweeper.sampler._target_={node.get('_target_')} is none of optuna.samplers.")
    return made


def read_space(params: Any, arguments: list[str], key: str = "hydra.sweeper.params") -> tuple[Space, list[str]]:
    """The space of a search in Optuna's words, out of Hydra's, and the overrides that all trials share.

    The command line wins over ``params``: a key to which it gives one value is searched no more.

    Raises:
        ValueError: words that are no override, or an interval that cannot be searched; names them.
    """
    if not isinstance(params, Mapping):
        raise SettingError(key, f"={params} must be a group of words such as gc.lam: interval(0.0, 1.0).")
    for name, words in params.items():
        if not isinstance(words, str) or not words:
            raise SettingError(f"{key}.{name}", f"={words} must be words such as interval(0.0, 1.0).")
    space: Space = {}
    common: dict[str, str] = {}
    for text in [*(f"{key}={sweep}" for key, sweep in params.items()), *arguments]:
        try:
            override = OverridesParser.create().parse_override(text)
            key = override.get_key_element()
            space.pop(key, None)
            common.pop(key, None)
            if override.is_sweep_override():
                space[key] = distribution_of(override)
            else:
                common[key] = text
        except (HydraException, ValueError, ArithmeticError) as error:
            raise ValueError(f"{text} cannot be searched: {str(error).splitlines()[0]}") from None
    return space, list(common.values())


def distribution_of(override: Override) -> BaseDistribution:
    """``interval``, ``range`` or ``choice``; whole numbers where both ends are."""
    sweep: Any = override.value()
    kind: dict[str, Any]
    if isinstance(sweep, IntervalSweep):
        ends, kind = (number("its start", sweep.start), number("its end", sweep.end)), {"log": "log" in sweep.tags}
    elif isinstance(sweep, RangeSweep):
        number("its length", (sweep.stop - sweep.start) / sweep.step, 1e-9, 1e6)  # type: ignore[operator]
        values = list(sweep.range())
        ends, kind = (values[0], values[-1]), {"step": sweep.step}
    else:
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    of_numbers: Any = IntDistribution if all(isinstance(end, int) for end in ends) else FloatDistribution
    return of_numbers(*ends, **kind)
