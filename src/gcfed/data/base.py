"""What a loader hands over, in NumPy arrays, nothing decoded lazily: uint8 images or tokens with int64 labels, or float
vectors with vectors to regress on.
"""

from dataclasses import dataclass

import numpy as np

IGNORE = -100
"""The label of padding."""
FLOATS = (np.float32, np.float64)


@dataclass(frozen=True, eq=False)
class Split:
    """Samples and labels of one split.

    x: uint8, images [n, C, H, W] or tokens [n, T], perhaps a read-only memory map; or float32 or float64 [n, d].
    y: int64 [n], class indices; of tokens also [n, T], one for each, −100 where it has none; of vectors also floats
        [n, C] to regress on.
    groups: int64 [n] or None, the natural client (writer, domain, speaker) of each sample.

    Raises ValueError for any other type or shape, or floats that are not finite.
    """

    x: np.ndarray
    y: np.ndarray
    groups: np.ndarray | None = None

    def __post_init__(self) -> None:
        vectors, n = self.x.dtype in FLOATS and self.x.ndim == 2, self.x.shape[:1]
        if not vectors and (self.x.dtype != np.uint8 or self.x.ndim not in (2, 4)):
            found = f"{self.x.dtype} {[*self.x.shape]}"
            raise ValueError(f"samples must be uint8 [n, C, H, W] or [n, T], or floats [n, d], not {found}")
        if vectors and not np.isfinite(self.x).all():
            raise ValueError("samples must be finite numbers")
        targets = vectors and self.y.dtype in FLOATS
        if targets and (self.y.ndim != 2 or self.y.shape[:1] != n):
            raise ValueError(f"targets must be floats [{len(self)}, C], not {self.y.dtype} {[*self.y.shape]}")
        if targets and not np.isfinite(self.y).all():
            raise ValueError("targets must be finite numbers")
        shapes = [n, self.x.shape] if self.x.ndim == 2 and not vectors else [n]
        for name, values, allowed in (("labels", None if targets else self.y, shapes), ("groups", self.groups, [n])):
            if values is not None and (values.dtype != np.int64 or values.shape not in allowed):
                wanted = " or ".join(str([*shape]) for shape in allowed)
                raise ValueError(f"{name} must be int64 {wanted}, not {values.dtype} {[*values.shape]}")

    def __len__(self) -> int:
        return len(self.x)

    def subset(self, keep: np.ndarray) -> "Split":
        """These samples alone, indices or bool [n]."""
        return Split(self.x[keep], self.y[keep], None if self.groups is None else self.groups[keep])

    @property
    def classes(self) -> np.ndarray:
        """The class index of every label, int64 [m]; m = n but for tokens, and 0 for targets that are no classes."""
        if self.y.dtype in FLOATS:
            return np.zeros(0, np.int64)
        return self.y if self.y.ndim == 1 else self.y[self.y != IGNORE]


@dataclass(frozen=True, eq=False)
class FederatedDataset:
    """A set before it is spread over clients: clients share ``train``, the global model is tested on ``test``.

    num_classes: C; of targets to regress on, their number of components.
    optimum: where the global minimum is known, the network's parameters there, name → array.

    Raises ValueError for labels outside 0 … num_classes − 1, an empty split, or as many names as there are not classes.
    """

    name: str
    num_classes: int
    train: Split
    test: Split
    class_names: tuple[str, ...] | None = None
    optimum: dict[str, np.ndarray] | None = None

    def __post_init__(self) -> None:
        for part, split in (("train", self.train), ("test", self.test)):
            if len(split) == 0:
                raise ValueError(f"data set {self.name!r}: the {part} split is empty")
            if split.y.dtype in FLOATS:
                if split.y.shape[1] != self.num_classes:
                    raise ValueError(f"data set {self.name!r}: {part} targets have {split.y.shape[1]} components")
                continue
            if not len(split.classes):
                raise ValueError(f"data set {self.name!r}: all labels of the {part} split are padding ({IGNORE})")
            low, high = int(split.classes.min()), int(split.classes.max())
            if low < 0 or high >= self.num_classes:
                raise ValueError(f"data set {self.name!r}: {part} labels {low} … {high} for {self.num_classes} classes")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise ValueError(
                f"data set {self.name!r}: {len(self.class_names)} class names for {self.num_classes} classes"
            )
