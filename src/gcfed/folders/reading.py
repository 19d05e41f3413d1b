"""Reads the files of a run folder: ``config.yaml``, ``summary.json`` and ``metrics.csv``.

pandas is imported late, because Hydra asks for the folder of a run before anything is built.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import yaml

from gcfed.utils.files import YamlLoader, whole_lines
from gcfed.utils.refusal import Refusal

if TYPE_CHECKING:
    import pandas as pd

# Limits of a file that may come from elsewhere; a run's own files are far below them.
MOST_BYTES = 5_000_000
MOST_VALUES = 200_000
DEEPEST = 100
LONGEST_TEXT = 20_000
MOST_ROUNDS = 10_000_000
_NAN = re.compile("nan", re.IGNORECASE)


def read_yaml(path: Path, *, aliases: bool = False) -> dict[Any, Any]:
    """A mapping from a file; {} from an empty one. Errors of YAML name the file.

    Args:
        aliases: whether the file may have some. Those of aliases multiply its values, so a file
            that may come from elsewhere has none.

    Raises Refusal for a file that is too large or too deep, and for one without keys.
    """
    _check_size(path)
    with path.open(encoding="utf-8") as file:
        _check_values(file, aliases)
        file.seek(0)
        content = yaml.load(file, YamlLoader)
    if content is None:
        return {}
    _require_keys(content, "it")
    return content


def _require_keys(content: Any, name: str) -> None:
    if not isinstance(content, dict):
        kind = "list" if isinstance(content, list) else "single value"
        raise Refusal(f"{name} holds a {kind}, not keys with values")


def _check_size(path: Path) -> None:
    """Raises Refusal for a file that is too large to be a config or a summary, or is a pipe."""
    if path.exists() and not path.is_file():
        raise Refusal(f"{path.name} is no regular file")
    if path.stat().st_size > MOST_BYTES:
        raise Refusal(f"{path.name} is larger than {MOST_BYTES / 1e6:.0f} MB")


def _check_values(file: IO[str], aliases: bool) -> None:
    """Raises Refusal if the YAML has too many values or levels, or an alias.

    It reads events, so that it neither recurses nor builds anything.
    """
    depth = 0
    for number, event in enumerate(yaml.parse(file, YamlLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent) and not aliases:
            raise Refusal(f"it has the alias *{event.anchor}")
        elif isinstance(event, yaml.ScalarEvent) and len(event.value) > LONGEST_TEXT:
            raise Refusal(f"it has a text of {len(event.value):,} characters")
        if depth > DEEPEST:
            raise Refusal(f"it has more than {DEEPEST} levels")
        if number > MOST_VALUES:
            raise Refusal(f"it has more than {MOST_VALUES:,} values")


def read_summary(path: Path) -> dict[str, Any]:
    """A run's ``summary.json``; {} while the run has not ended."""
    if not path.is_file():
        return {}
    _check_size(path)
    content = json.loads(path.read_text(encoding="utf-8-sig"))
    _require_keys(content, path.name)
    return content


def read_metrics(path: Path | None) -> pd.DataFrame:
    """The rows by round; none if the file is missing or None.

    A last line that a kill cut short is left out.

    An empty cell (not measured) is NaN. A cell ``nan`` (measured, not finite) is read as infinite,
    so that the last number of a diverged run is not taken from an earlier round.

    Raises Refusal for another table: rounds that are not ascending whole numbers from 1, equal
    headings, rows of another length.
    """
    import pandas as pd

    lines = [] if path is None else [line for line in whole_lines(path) if line]
    if path is None or len(lines) < 2:
        return pd.DataFrame(index=pd.Index([], name="round", dtype="int64"))
    _check_cells(lines, path.name)
    header, *rows = lines
    measured = [header, *(_NAN.sub("inf", row) for row in rows)]
    # an empty cell alone is a missing one: "N/A" is refused as a text
    table = pd.read_csv(
        io.StringIO("\n".join(measured)),
        index_col="round",
        dtype=float,
        keep_default_na=False,
        na_values=[""],
    )
    rounds = table.index.to_numpy(dtype=float)
    are_whole = bool((rounds == np.floor(rounds)).all())
    are_ascending = bool((np.diff(rounds) > 0).all())
    are_in_range = rounds[0] >= 1 and rounds[-1] <= MOST_ROUNDS
    if not (are_whole and are_ascending and are_in_range):
        raise Refusal(f"the rounds of {path.name} are not ascending whole numbers from 1")
    table.index = table.index.astype("int64")
    return table


def _check_cells(lines: Sequence[str], name: str) -> None:
    """Raises Refusal for a table in which a cell would be read as another column's."""
    header, *rows = csv.reader(lines)
    if "round" not in header:
        raise Refusal(f"{name} has no column round")
    if len({*header}) < len(header):
        raise Refusal(f"two columns of {name} have the same name")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise Refusal(
                f"row {number} of {name} has {len(row)} cells, and its heading {len(header)}"
            )


def column(metrics: pd.DataFrame, name: str) -> pd.Series:
    """A column in the rounds that measured it; empty if none did."""
    if name not in metrics:
        return metrics.index[:0].to_series().astype(float)
    return metrics[name].dropna()


def tested_in(metrics: pd.DataFrame, round_number: int) -> bool:
    """Whether a run has a test of this round; not if no logger has written rows."""
    return round_number in column(metrics, "test/loss").index
