"""What a search draws, and by what: Optuna's words out of Hydra's, and the settings that cannot work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from pydantic import Field

from gcfed.runs.measures import parse
from gcfed.runs.reading import shipped
from gcfed.study.jobs import Seeds, different, settings_of
from gcfed.utils.checked import Count, Number, SettingError, Whole, checked, fits
from gcfed.utils.instantiate import require

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
    params: dict

    def __post_init__(self) -> None:
        different("seeds", self.seeds)
        if self.storage == "":
            raise SettingError("storage", "='' must be an address such as sqlite:///search.db, or null.")
        space, made = read_space(self.params, [], "params")[0], sampler_of(self.sampler, 0)
        if isinstance(made, optuna.samplers.GridSampler | optuna.samplers.BruteForceSampler):
            raise SettingError("sampler", " ends a study by itself, as n_trials does: sweep a grid with -m key=a,b.")
        try:
            optuna.create_study(sampler=made).ask(space)
        except Exception as error:  # some samplers look at their settings only now
            raise SettingError("sampler", f" cannot draw from these params: {error}") from error


@checked
@dataclass(frozen=True)
class Tuning(Settings):
    """``study.search``: each cell is searched with these settings.

    Args:
        metric: what the trials are compared by.
        knobs: override → further params of the cells that have it.
        overrides: of the trials: a validation split, and a seed that no job has.
    """

    metric: str
    knobs: dict
    overrides: list[str] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        parse(self.metric, "metric")
        for override, more in self.knobs.items():
            read_space(more, [], f"knobs.{override}")


def read_tuning(node: Any) -> Tuning:
    """``study.search``, over the sweeper's own settings but for the number of trials, and what they search."""
    own = {key: value for key, value in shipped("hydra/sweeper/optuna").items() if not key.startswith("_")}
    del own["n_trials"], own["params"]
    return settings_of("study.search", Tuning, {**own, **node})


def sampler_of(node: Any, seed: int) -> optuna.samplers.BaseSampler:
    """Optuna's sampler of ``hydra.sweeper.sampler``; or ValueError, if it makes none."""
    tree = OmegaConf.create({"hydra": {"sweeper": {"sampler": node}}})  # an error names the key
    made = require(tree.hydra.sweeper, "sampler", seed=seed)
    if not isinstance(made, optuna.samplers.BaseSampler):
        raise ValueError(f"hydra.sweeper.sampler._target_={node.get('_target_')} is none of optuna.samplers.")
    return made


def read_space(
    params: Mapping[str, Any], arguments: list[str], name: str = "hydra.sweeper.params"
) -> tuple[Space, list[str]]:
    """The space of a search in Optuna's words, out of Hydra's, and the overrides that all trials share.

    The command line wins over ``params``: a key to which it gives one value is searched no more. A ValueError names
    words that are no override, or an interval that cannot be searched.
    """
    for key, words in fits(name, params, dict).items():
        if not isinstance(words, str) or not words:
            raise SettingError(f"{name}.{key}", f"={words} must be words such as interval(0.0, 1.0).")
    found: dict[str, BaseDistribution | str] = {}
    for text in [*(f"{key}={words}" for key, words in params.items()), *arguments]:
        try:
            override = OverridesParser.create().parse_override(text)
            key = override.get_key_element()
            found.pop(key, None)  # the last word on a key also has the last place
            found[key] = distribution_of(override) if override.is_sweep_override() else text
        except (HydraException, ValueError, ArithmeticError) as error:
            raise ValueError(f"{text} cannot be searched: {str(error).splitlines()[0]}") from None
    space = {key: drawn for key, drawn in found.items() if not isinstance(drawn, str)}
    return space, [text for text in found.values() if isinstance(text, str)]


def distribution_of(override: Override) -> BaseDistribution:
    """``interval``, ``range`` or ``choice``; whole numbers where both ends are."""
    sweep: Any = override.value()
    if odd := sweep.tags - ({"log"} if isinstance(sweep, IntervalSweep) else set()):
        raise ValueError(f"tag({min(odd)}, …) is known for intervals alone, and as log")
    if isinstance(sweep, IntervalSweep):
        ends = fits("its start", sweep.start, Number), fits("its end", sweep.end, Number)
        kind: dict[str, Any] = {"log": "log" in sweep.tags}
    elif isinstance(sweep, RangeSweep):
        fits("its length", (sweep.stop - sweep.start) / sweep.step, Annotated[float, Field(ge=1e-9, le=1e6)])  # type: ignore[operator]
        values = list(sweep.range())
        ends, kind = (values[0], values[-1]), {"step": sweep.step}
    else:
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    of_numbers: Any = IntDistribution if all(isinstance(end, int) for end in ends) else FloatDistribution
    return of_numbers(*ends, **kind)
