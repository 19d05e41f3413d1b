"""What a loader hands over: uint8 images and int64 labels in NumPy arrays, nothing decoded lazily."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Split:
    """Images and labels of one split.

    x: uint8 [n, C, H, W], perhaps a read-only memory map.
    y: int64 [n], class indices.
    groups: int64 [n] or None, the natural client (writer, domain) of each sample.

    Raises ValueError for any other type or shape.
    """

    x: np.ndarray
    y: np.ndarray
    groups: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.x.dtype != np.uint8 or self.x.ndim != 4:
            raise ValueError(f"images must be uint8 [n, C, H, W], not {self.x.dtype} {list(self.x.shape)}")
        for name, values in (("labels", self.y), ("groups", self.groups)):
            if values is not None and (values.dtype != np.int64 or values.shape != (len(self.x),)):
                raise ValueError(f"{name} must be int64 [{len(self.x)}], not {values.dtype} {list(values.shape)}")

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, eq=False)
class FederatedDataset:
    """A set before it is spread over clients: clients share ``train``, the global model is tested on ``test``.

    Raises ValueError for labels outside 0 … num_classes − 1, an empty split, or as many names as there are not classes.
    """

    name: str
    num_classes: int
    train: Split
    test: Split
    class_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for part, split in (("train", self.train), ("test", self.test)):
            if len(split) == 0:
                raise ValueError(f"data set {self.name!r}: the {part} split is empty")
            low, high = int(split.y.min()), int(split.y.max())
            if low < 0 or high >= self.num_classes:
                raise ValueError(f"data set {self.name!r}: {part} labels {low} … {high} for {self.num_classes} classes")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise ValueError(
                f"data set {self.name!r}: {len(self.class_names)} class names for {self.num_classes} classes"
            )
