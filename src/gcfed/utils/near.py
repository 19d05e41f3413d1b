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


def suggestion(word: str, known: Iterable[str], before: str = "", after: str = "") -> str:
    """``: did you mean client.optimizer.lr?``, or a full stop.

    A key of a group gets keys of this group only. Else keys of the same depth go first.
    """
    known = list(known)
    group, dot, _ = word.partition(".")
    in_group = [other for other in known if other.startswith(f"{group}.")] if dot else []
    names = {other: other.split(".")[-1] for other in in_group or known}
    last = word.split(".")[-1]
    nearest = closest(last, {*names.values()})
    near = [other for other, name in names.items() if name in nearest]
    sharing = [other for other, name in names.items() if _shares_words(last, name)]
    alike = near or sharing
    depth = word.count(".")
    as_deep = [other for other in alike if other.count(".") == depth]
    best = as_deep or alike
    return did_you_mean([before + other + after for other in best[:3]])


def _shares_words(one: str, other: str) -> bool:
    """Whether all words of one name are in the other: those of ``epochs`` in ``local_epochs``."""
    return f"_{one}_" in f"_{other}_" or f"_{other}_" in f"_{one}_"
