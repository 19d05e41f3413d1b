"""Known names that are near an unknown one, as the end of a sentence."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

MOST_NAMES = 12


def closest(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """At most so many known names that are spelt nearly like this one, the nearest first."""
    return get_close_matches(name, [*known], most, cutoff=0.75)


def near(name: str, known: Iterable[str]) -> str:
    """The known names that are near, or those of the same group, or all."""
    names = list(dict.fromkeys(known))
    alike = closest(name, names, 2)
    if alike:
        return did_you_mean(alike)
    group = name.partition("/")[0]
    listed = [other for other in names if other.startswith(f"{group}/")] or names
    more = f", … ({len(listed):,} in all)" if len(listed) > MOST_NAMES else ""
    return f". There are {', '.join(listed[:MOST_NAMES])}{more}."


def did_you_mean(names: Sequence[str]) -> str:
    """``: did you mean test/acc or val/acc?``; a full stop without names."""
    return f": did you mean {' or '.join(names)}?" if names else "."
