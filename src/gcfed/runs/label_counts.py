"""``label_counts.npz``: how many samples of each class some clients of a run hold, small whatever the federation."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gcfed.utils.files import replacing

if TYPE_CHECKING:
    from gcfed.data.datamodule import FederatedDataModule

LABEL_COUNTS = "label_counts.npz"
LARGEST = 2**26  # bytes that are unpacked


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """clients: ids [S].  counts: integers [S, C], samples of class c on client s.  of: clients in all.

    names: of the classes, [C], where they have any.
    """

    clients: NDArray[np.int64]
    counts: NDArray[np.int64]
    of: int
    names: tuple[str, ...] = ()

    def save(self, folder: Path) -> None:
        with replacing(folder / LABEL_COUNTS) as temporary, temporary.open("wb") as file:
            np.savez(file, clients=self.clients, counts=self.counts, of=self.of, names=np.array(self.names, str))

    @classmethod
    def load(cls, folder: Path) -> LabelCounts | None:
        """Read it back; None where a run's folder has none, or none that can be read."""
        try:
            with np.load(folder / LABEL_COUNTS) as file:
                if sum(part.file_size for part in file.zip.infolist()) > LARGEST:
                    return None
                names = tuple(map(str, file["names"])) if "names" in file else ()
                found = cls(file["clients"], file["counts"], int(file["of"]), names)
            rows, classes = found.counts.shape
            fits = rows == len(found.clients) and len(names) in (0, classes) and all(map(str.isprintable, names))
            return found if fits and found.counts.dtype.kind in "iu" and found.counts.min() >= 0 else None
        except (OSError, ValueError, TypeError, KeyError, EOFError, AttributeError, zipfile.BadZipFile):
            return None


def counts_of(data: FederatedDataModule) -> LabelCounts | None:
    """Of up to 50 clients, evenly spaced; None where labels are no classes."""
    if data.labels.dtype.kind != "i":
        return None
    assert data.partition is not None
    clients = evenly(data.num_clients, 50)
    counts = data.partition.label_counts(data.labels, data.num_classes, clients=clients)
    names = data.dataset.class_names or ()
    return LabelCounts(clients, counts, data.num_clients, names if len(names) == data.num_classes else ())


def evenly(n: int, most: int) -> NDArray[np.int64]:
    """At most ``most`` of the ids 0 to n − 1, evenly spaced."""
    return np.unique(np.arange(most) * n // most)
