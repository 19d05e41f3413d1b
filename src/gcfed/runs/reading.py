"""Reads the files of a run folder: ``config.yaml``, ``summary.json`` and ``metrics.csv``.

pandas is imported late, because Hydra asks for the folder of a run before anything is built.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

if TYPE_CHECKING:
    import pandas as pd

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # yaml.safe_load, ten times faster


def read_yaml(path: Path) -> dict[Any, Any]:
    """A mapping from a file; {} from an empty one. Errors of YAML name the file."""
    with path.open(encoding="utf-8") as file:
        return dict(yaml.load(file, Loader) or {})


def read_summary(path: Path) -> dict[str, Any]:
    """A run's ``summary.json``; {} while the run has not ended."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_metrics(path: Path | None) -> pd.DataFrame:
    """The rows by round; none if the file is missing or None.

    A last line that a kill cut short is left out.

    An empty cell (not measured) is NaN. A cell ``nan`` (measured, not finite) is read as infinite,
    so that the last number of a diverged run is not taken from an earlier round.
    """
    import pandas as pd

    whole = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
    whole = whole[: whole.rfind("\n") + 1]
    if whole.count("\n") < 2:
        return pd.DataFrame(index=pd.Index([], name="round", dtype="int64"))
    header, body = whole.split("\n", 1)
    table = pd.read_csv(
        io.StringIO(f"{header}\n{body.replace('nan', 'inf')}"), index_col="round", dtype=float
    )
    table.index = table.index.astype("int64")
    return table


def column(metrics: pd.DataFrame, name: str) -> pd.Series:
    """A column in the rounds that measured it; empty if none did."""
    return (
        metrics[name].dropna() if name in metrics else metrics.index[:0].to_series().astype(float)
    )


def label_skew(held_NC: np.ndarray) -> dict[str, float]:
    """How far the clients' labels are from the labels of all clients together, from 0 (i.i.d.) to
    1.

    Means over the clients with samples of two distances between p, the shares of the classes at a
    client, and q, those of all samples: Hellinger √(1 − Σ √(p q)), and Jensen–Shannon √(H((p +
    q)/2) − (H(p) + H(q))/2), entropies in bits.
    """

    def entropy(shares: np.ndarray) -> np.ndarray:
        return -(shares * np.log2(np.maximum(shares, 1e-300))).sum(-1)

    counts_NC = held_NC[held_NC.sum(1) > 0]
    p_NC, q_C = counts_NC / counts_NC.sum(1, keepdims=True), counts_NC.sum(0) / counts_NC.sum()
    shannon_N = entropy((p_NC + q_C) / 2) - (entropy(p_NC) + entropy(q_C)) / 2
    squares = {"hellinger": 1 - np.sqrt(p_NC * q_C).sum(1), "jensen_shannon": shannon_N}
    return {
        f"partition/{name}": float(np.sqrt(square_N.clip(0)).mean())
        for name, square_N in squares.items()
    }
