"""``metrics.csv``, a row a round, is read here alone; ``gcfed.loggers.round_csv`` writes it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from gcfed.runs.reading import Rounds, naming, read_text
from gcfed.utils.checked import fits

if TYPE_CHECKING:
    import pandas as pd  # a run imports it at its end only

SIZE, COLUMNS = 2**28, 10_000


def read_metrics(path: Path | None, *, text: bool = False) -> pd.DataFrame:
    """The rows by round; none where there is no file, or None for one. A last line that a kill cut short is left out.

    An empty cell, where nothing was measured, is NaN; one that says ``nan`` was measured, and is infinite like others
    that are not finite, so that the last number of a run that diverged is not one from before.

    Args:
        text: cells as they stand in the file instead of numbers, to be written again as they were.

    Raises:
        ValueError: it is no table of numbers with a column ``round``.
    """
    import pandas as pd

    whole = ""
    if path is not None and path.exists():
        with naming(path):
            whole = read_text(path, SIZE)
    whole = whole[: whole.rfind("\n") + 1]
    if path is None or whole.count("\n") < 2:
        return pd.DataFrame(index=pd.Index([], name="round", dtype="int64"))
    header, body = whole.split("\n", 1)
    with naming(path):
        try:
            if header.count(",") > COLUMNS:
                raise ValueError(f"it has more than {COLUMNS:,} columns")
            if text:
                return pd.read_csv(io.StringIO(whole), dtype=str, keep_default_na=False).set_index("round", drop=False)
            table = pd.read_csv(io.StringIO(f"{header}\n{body.replace('nan', 'inf')}"), index_col="round", dtype=float)
            found, table.index = table.index, table.index.astype("int64")
            if not ((table.index == found).all() and table.index.is_monotonic_increasing and table.index.is_unique):
                raise ValueError("its rounds are no whole numbers that increase")
            fits("round", int(found[-1]), Rounds)
        except (ValueError, KeyError) as error:
            raise ValueError(f"it is no table of numbers with a column 'round': {error}") from None
    return table


def column(metrics: pd.DataFrame, name: str) -> pd.Series:
    """A column where it was measured, by round; empty where it never was."""
    return metrics[name].dropna() if name in metrics else metrics.index[:0].to_series().astype(float)
