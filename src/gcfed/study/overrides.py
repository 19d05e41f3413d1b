"""Hydra overrides as text: their keys, lists of them merged, values quoted, and folders named after them."""

import re
from collections.abc import Iterable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

from gcfed.utils.resolvers import changes_results

_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "η": "eta", "λ": "lambda", "μ": "mu", "ν": "nu", "ρ": "rho",
    "τ": "tau",
}  # fmt: skip
_LONGEST = 120  # characters of a folder's suffix: file systems end at 255 bytes


def key_of(override: str) -> str:
    """``+client.epochs=2`` → ``client.epochs``."""
    return override.lstrip("+~").split("=", 1)[0]


def merge(*lists: Iterable[str]) -> tuple[str, ...]:
    """All overrides in order; of those with the same key the last one alone."""
    merged: dict[str, str] = {}
    for override in (o for overrides in lists for o in overrides):
        merged.pop(key_of(override), None)
        merged[key_of(override)] = override
    return tuple(merged.values())


def quoted(value: str) -> str:
    """A text that Hydra takes for a value as it stands, whatever is in it."""
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value) + "'"


def slug(label: str) -> str:
    """A label as part of a folder's name: ``CIFAR-10, 5/100, α 0.05`` → ``cifar-10-5-100-alpha-0.05``."""
    text = "".join(f" {_GREEK[c]} " if c in _GREEK else c for c in label.lower())
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", "", text)  # a dot is for numbers
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-")


def identity(overrides: Iterable[str]) -> tuple[str, ...]:
    """What a run is recognised by: its overrides, but for those that change no result, in one order."""
    return tuple(sorted(filter(changes_results, overrides)))


def suffix(extra: Sequence[str]) -> str:
    """What tells a folder from that without these overrides: ``,client.epochs=2``; "" where none changes results."""
    text = "".join(f",{override.lstrip('+')}" for override in identity(extra))
    text = re.sub(r"[^\w.,=~\[\]-]+", "-", text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 9]}-{_checksum(text)}"


def _checksum(text: str) -> str:
    import zlib

    return f"{zlib.crc32(text.encode()):08x}"


def single_valued(overrides: Sequence[str]) -> None:
    """Refuses ``key=1,2`` and other sweeps.

    Raises:
        ValueError: names the override.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_sweep_override():
            raise ValueError(
                f"{override.input_line} has several values; a study sweeps over its rows, columns and seeds only. "
                "Give one value, or write the values as rows of a study of your own in configs/study/."
            )
