"""The checks of single settings: numbers, switches, choices. Each returns the value, or names its key."""

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")
LARGEST = 1e9  # of a fraction without a bound of its own: its square is finite in float32
SMALLEST = 1e-18  # of what must be above 0: its square is not 0 in float32


def number(
    key: str,
    value: T,
    low: float = -LARGEST,
    high: float = LARGEST,
    *,
    whole: bool = False,
    above: bool = False,
    below: bool = False,
    none: bool = False,
    auto: bool = False,
) -> T:
    """``value``, if it is a number from ``low`` to ``high``: never NaN, a boolean or a string.

    Args:
        key: the setting's dotted key.
        whole: without fractions.
        above, below: not ``low``, not ``high`` itself; nor so close above 0 that float32 has 0 for it.
        none, auto: null, or the word ``auto``, is allowed too.

    Raises:
        ValueError: it is not; ``client.epochs=0 must be a whole number of at least 1.``
    """
    if whole and high == LARGEST:
        high = 2**63 - 1
    if (none and value is None) or (auto and isinstance(value, str) and value == "auto"):
        return value
    x: Any = value
    tiny = SMALLEST if above and low == 0 and not whole else low
    fits = isinstance(x, Integral if whole else Real) and not isinstance(x, bool)
    if fits and (low < x if above else low <= x) and tiny <= x and (x < high if below else x <= high):
        return value
    least = f"of at least {tiny:g}" if fits and 0 < x < tiny else f"above {low:g}" if above else f"of at least {low:,g}"
    most = f"below {high:,g}" if below else f"at most {high:,.15g}"
    if high >= LARGEST and low > -LARGEST and not (fits and x > high):
        bounds = least  # the user need not read a bound that only keeps numbers finite
    else:
        bounds = f"{least}, {most}" if above or below else f"from {low:,g} to {high:,.15g}"
    what = f"a whole number {bounds}" if whole else f"a number {bounds}"
    raise ValueError(f"{key}={value} must be {'auto or ' * auto}{what}{', or null' * none}.")


def numbers(
    key: str, values: T, low: float = -LARGEST, high: float = LARGEST, *, length: int | None = None, **rules: bool
) -> T:
    """``values``, if they are a list of such numbers, of the length that is asked for.

    Raises:
        ValueError: they are not; names the key.
    """
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != (length or len(values)):
        raise ValueError(f"{key}={values} must be a list of {f'{length} ' if length else ''}numbers.")
    for i, value in enumerate(values):
        number(f"{key}[{i}]", value, low, high, **rules)
    return values


def flag(key: str, value: Any) -> bool:
    """``value``, if it is a boolean: any other word would count as true.

    Raises:
        ValueError: it is not; names the key.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value} must be true or false.")
    return value


def word(key: str, value: T) -> T:
    """``value``, if it is text, or None.

    Raises:
        ValueError: it is not; names the key.
    """
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{key}={value} must be text, or null.")
    return value


def part(key: str, value: T) -> T:
    """``value``, if it can be called, as what the config builds or names with ``_target_`` can.

    Raises:
        ValueError: it cannot; names the key.
    """
    if not callable(value):
        raise ValueError(f"{key}={value} must be a group of settings with a _target_.")
    return value


def choice(key: str, value: T, options: Iterable[Any]) -> T:
    """``value``, if it is one of ``options``.

    Raises:
        ValueError: it is not; names the key and the options.
    """
    options = list(options)
    if value not in options:
        *some, last = ("null" if option is None else str(option) for option in options)
        raise ValueError(f"{key}={value} is unknown: choose {', '.join(some)} or {last}.")
    return value
