"""The space of a search, in Hydra's words: ``interval``, ``range``, ``choice``, ``tag(log, …)``, as Optuna takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

Space = dict[str, BaseDistribution]


def read_space(params: Mapping[str, Any], arguments: Sequence[str]) -> tuple[Space, list[str], dict[str, str]]:
    """The space, the overrides that all trials share, and the space as text; the command line wins over ``params``.

    A key that the command line gives one value is searched no more.

    Raises:
        ValueError: words that are no override, or an interval that cannot be searched; names them.
    """
    space: Space = {}
    texts: dict[str, str] = {}
    fixed: dict[str, str] = {}
    for override in [*map(_parse, (f"{k}={v}" for k, v in params.items())), *map(_parse, arguments)]:
        key = override.get_key_element()
        for known in (space, texts, fixed):
            known.pop(key, None)
        assert override.input_line is not None
        if override.is_sweep_override():
            space[key], texts[key] = _distribution(override), override.input_line.split("=", 1)[1]
        else:
            fixed[key] = override.input_line
    return space, list(fixed.values()), texts


def text_of(value: Any) -> str:
    """A drawn value as Hydra reads it; those of a ``choice`` are texts already."""
    return value if isinstance(value, str) else repr(value)


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ValueError(f"{text} is no override that Hydra can read: {str(error).splitlines()[0]}") from None


def _distribution(override: Override) -> BaseDistribution:
    sweep = override.value()
    try:
        if isinstance(sweep, IntervalSweep):
            log = "log" in sweep.tags
            assert sweep.start is not None
            assert sweep.end is not None
            if isinstance(sweep.start, int) and isinstance(sweep.end, int):
                return IntDistribution(sweep.start, sweep.end, log=log)
            return FloatDistribution(sweep.start, sweep.end, log=log)
        if isinstance(sweep, RangeSweep):
            values = list(sweep.range())
            if all(isinstance(v, int) for v in values):
                return IntDistribution(values[0], values[-1], step=int(sweep.step))
            return FloatDistribution(values[0], values[-1], step=sweep.step)
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    except (ValueError, IndexError) as error:
        raise ValueError(f"{override.input_line} cannot be searched: {error}") from None
