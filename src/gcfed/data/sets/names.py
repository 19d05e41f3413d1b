"""Names of classes, clients and categories. They are texts, also if they look like numbers."""

import logging
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from gcfed.data.sets.files import Note, listing
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)
_NUMBER = re.compile(r"[+-]?[0-9]{1,99}(\.[0-9]{0,99})?")


def clean(text: str) -> str:
    """The text in Unicode's composed form (NFC), without spaces around it."""
    return unicodedata.normalize("NFC", text).strip()


def number_names(values_n: np.ndarray, what: str = "a name") -> tuple[np.ndarray, tuple[str, ...]]:
    """The number of each value, int64 [n], and the names, in the order of their numbers.

    Texts that differ after :func:`clean` get different numbers, in the order of the texts. Other
    values, such as integers, keep their own order.

    Raises Refusal, with ``what`` they are, for an empty text.
    """
    values, position_n = np.unique(values_n, return_inverse=True)
    if values.dtype.kind != "U":
        return position_n, tuple(map(str, values.tolist()))
    cleaned = [clean(text) for text in values.tolist()]
    if "" in cleaned:
        raise Refusal(f"{what} is an empty text: fill it, or drop the sample")
    # of objects: an array of texts would drop a zero character at an end
    names, numbers = np.unique(np.array(cleaned, object), return_inverse=True)
    return numbers[position_n], tuple(names.tolist())


def announce(place: str, kind: str, names: Sequence[str], note: Note = log.log) -> None:
    """Logs how many names there are and the first of them, and warns of names that are nearly
    equal.

    Args:
        place: the file or folder.
        kind: ``classes`` or ``clients``.
    """
    note(logging.INFO, f"{place}: {len(names)} {kind}: {listing(names)}")
    pairs = nearly_equal(names)
    if pairs:
        one, other = pairs[0]
        what = f"{len(pairs)} of the {kind} nearly equal another one"
        note(logging.WARNING, f"{place}: {what}, such as {one!r} and {other!r}: they stay apart")


def nearly_equal(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of names that differ only in upper case, in spaces, or in how a number is written."""
    first: dict[str, str] = {}
    pairs = []
    for name in names:
        earlier = first.setdefault(_likeness(name), name)
        if earlier != name:
            pairs.append((earlier, name))
    return pairs


def _likeness(name: str) -> str:
    if _NUMBER.fullmatch(name):
        return str(Fraction(name))
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())
