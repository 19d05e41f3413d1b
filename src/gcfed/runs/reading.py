"""The files of a run folder: ``config.yaml``, ``summary.json``, ``metrics.csv`` and ``label_counts.npz``.

Damaged files raise a ValueError that names the file. A stranger's folder is not checked any further.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gcfed.utils.files import replacing

if TYPE_CHECKING:
    import numpy as np  # nothing heavy is imported before Hydra has asked for the folder of a run
    import pandas as pd
    from numpy.typing import NDArray

    from gcfed.data.datamodule import FederatedDataModule

LABEL_COUNTS = "label_counts.npz"
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # yaml.safe_load, ten times faster


def read_yaml(path: Path) -> dict[Any, Any]:
    """A mapping from a file; {} from an empty one."""
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path.name}: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds no settings")
    return found


def read_summary(path: Path) -> dict[str, Any]:
    """A run's ``summary.json``; {} where there is none, since the run has not come to its end."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name}: {error}") from None


def read_metrics(path: Path | None) -> pd.DataFrame:
    """The rows by round; no rows for a missing file or None. A last line that a kill cut short is left out.

    An empty cell (not measured) is NaN. A cell ``nan`` was measured but is not finite: it is read as infinite, so that
    the last number of a diverged run is not one from before.
    """
    import pandas as pd

    whole = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
    whole = whole[: whole.rfind("\n") + 1]
    if whole.count("\n") < 2:
        return pd.DataFrame(index=pd.Index([], name="round", dtype="int64"))
    header, body = whole.split("\n", 1)
    try:
        table = pd.read_csv(io.StringIO(f"{header}\n{body.replace('nan', 'inf')}"), index_col="round", dtype=float)
        table.index = table.index.astype("int64")
    except ValueError as error:
        raise ValueError(f"{path and path.name}: no table of numbers with a column 'round': {error}") from None
    return table


def column(metrics: pd.DataFrame, name: str) -> pd.Series:
    """A column where it was measured, by round; empty where it never was."""
    return metrics[name].dropna() if name in metrics else metrics.index[:0].to_series().astype(float)


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """How many samples of each class some clients of a run hold: ``label_counts.npz``, small for any federation."""

    clients: NDArray[np.int64]  # ids [S]
    counts: NDArray[np.int64]  # [S, C], samples of class c on client s
    of: int  # clients in all
    names: tuple[str, ...] = ()  # of the classes, [C], where they have any

    def save(self, folder: Path) -> None:
        import numpy as np

        with replacing(folder / LABEL_COUNTS) as temporary, temporary.open("wb") as file:
            np.savez(file, clients=self.clients, counts=self.counts, of=self.of, names=np.array(self.names, str))

    @classmethod
    def load(cls, folder: Path) -> LabelCounts | None:
        """Read it back; None where a run's folder has none."""
        import numpy as np

        if not (folder / LABEL_COUNTS).is_file():
            return None
        with np.load(folder / LABEL_COUNTS) as file:
            return cls(file["clients"], file["counts"], int(file["of"]), tuple(map(str, file["names"])))


def counts_of(data: FederatedDataModule) -> LabelCounts | None:
    """Of up to 50 clients, evenly spaced; None where labels are no classes."""
    if data.labels.dtype.kind != "i":
        return None
    clients = evenly(data.num_clients, 50)
    counts = data.partition.label_counts(data.labels, data.num_classes, clients=clients)
    names = data.dataset.class_names or ()
    return LabelCounts(clients, counts, data.num_clients, names if len(names) == data.num_classes else ())


def evenly(n: int, most: int) -> NDArray[np.int64]:
    """At most ``most`` of the ids 0 to n − 1, evenly spaced."""
    import numpy as np

    return np.unique(np.arange(most) * n // most)
