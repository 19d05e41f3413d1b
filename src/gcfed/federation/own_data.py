"""Data that a site brings: they take the place of the run's, and keep its classes, transform and clients' ids."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import numpy as np

from gcfed.data.base import FederatedDataset, Split
from gcfed.data.datamodule import FederatedDataModule
from gcfed.data.partition import Partition, Partitioner
from gcfed.data.sets.own import arrays as read_arrays
from gcfed.data.sets.own import image_folder

TEST = 1e-6  # share set aside where a site has no test split: one sample, since a data set must have one


@dataclass(frozen=True)
class Held:
    """The partition of what one site holds, among its own clients; the run's others have nothing here.

    clients: ids of the site's own, ascending.
    of: the run's partition, which is asked only where the site has several clients.
    """

    clients: Sequence[int]
    of: Partitioner

    def __call__(
        self, labels: np.ndarray, num_clients: int, *, seed: int, groups: np.ndarray | None = None
    ) -> Partition:
        owner_n = np.zeros(len(labels), np.int64)
        if len(self.clients) > 1:
            owner_n = self.of(labels, len(self.clients), seed=seed, groups=groups).owners(len(labels))
        return Partition.from_owners(np.append(self.clients, -1)[owner_n], num_clients)


def own_data(
    *,
    arrays: str | None,
    folder: str | None,
    clients: Sequence[int],
    classes: Sequence[str] | None,
    partitioner: Partitioner,
    data_dir: str = "data",
    size: int | None = None,
    **settings: Any,
) -> FederatedDataModule:
    """The data module of a site.

    Args:
        arrays, folder: its data, an ``.npz`` or a folder of images; one of them.
        clients: ids of its clients.
        classes: the names of the run's classes, by which its labels are numbered; None: they are no classes.
        partitioner: the run's.
        data_dir: where decoded images are cached.
        size: of images, as in ``data=image_folder``.
        settings: the run's own of :class:`FederatedDataModule`.
    """
    if arrays is not None:
        load = partial(read_arrays, arrays, TEST)
    else:
        load = partial(image_folder, folder, data_dir, size, TEST)
    settings = {key: value for key, value in settings.items() if key in signature(FederatedDataModule).parameters}
    return FederatedDataModule(
        dataset=partial(named, load, classes, standardized=settings.get("standardize", False)),
        partitioner=Held(clients, partitioner),
        **settings,
    )


def named(load: Any, classes: Sequence[str] | None, standardized: bool) -> FederatedDataset:
    """A data set whose labels are numbers of the run's classes.

    Raises:
        ValueError: it has a class that the run does not know, or is to be standardized by all sites' mean.
    """
    found: FederatedDataset = load()
    if standardized and found.train.x.dtype.kind == "f":
        raise ValueError("data.standardize=true is by the mean of all samples, which no site knows: set it to false.")
    if classes is None or found.class_names is None:
        return found
    if unknown := sorted(set(found.class_names) - set(classes)):
        raise ValueError(f"{found.name} has the class {unknown[0]}, and the run's are {', '.join(classes)}.")
    number = np.array([list(classes).index(name) for name in found.class_names])

    def renumbered(split: Split) -> Split:
        return replace(split, y=number[split.y])

    return replace(
        found, train=renumbered(found.train), test=renumbered(found.test), num_classes=len(classes),
        class_names=tuple(classes),
    )  # fmt: skip
