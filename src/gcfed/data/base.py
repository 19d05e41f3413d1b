"""A data set as NumPy arrays: images, tokens or vectors, with classes or targets
of a regression.
"""

from dataclasses import dataclass

import numpy as np

from gcfed.tasks import IGNORE

FLOATS = (np.float32, np.float64)


@dataclass(frozen=True, eq=False)
class Split:
    """Samples and labels of one split.

    x: images, uint8 [n, C, H, W]; tokens, uint8 or int32 [n, T]; or vectors, float32 or float64 [n,
        d]. May be mapped.
    y: class indices, int64 [n]. Tokens may have one each, int64 [n, T], with −100 for none. Vectors
        may have targets of a regression, floats [n, C].
    groups: the natural client (writer, domain, speaker) of each sample, int64 [n] or None.

    Raises ValueError for another type or shape, or for floats that are not finite.
    """

    x: np.ndarray
    y: np.ndarray
    groups: np.ndarray | None = None

    def __post_init__(self) -> None:
        x, y, n = self.x, self.y, self.x.shape[:1]
        vectors, tokens = (
            x.dtype in FLOATS and x.ndim == 2,
            x.dtype in (np.uint8, np.int32) and x.ndim == 2,
        )
        targets = vectors and y.dtype in FLOATS and y.ndim == 2 and len(y) == len(x)
        samples = (
            "images, uint8 [n, C, H, W] of 0 … 255, tokens, uint8 or int32 [n, T], or floats [n, d]"
        )
        numbers = x.ndim in (3, 4) and x.dtype != np.uint8 and x.dtype.kind in "iufb" and len(x) > 0
        if numbers and 0 <= x.min() <= x.max() <= 255:
            samples += f" ((x * {255 if x.max() <= 1 else 1}).round().astype('uint8') makes images)"
        labels = (
            f"int64 [{len(x)}]{f' or {[*x.shape]}' * tokens}{f' or floats [{len(x)}, C]' * vectors}"
        )
        for name, values, right, wanted in (
            ("samples", x, vectors or tokens or (x.dtype == np.uint8 and x.ndim == 4), samples),
            (
                "labels",
                y,
                targets or (y.dtype == np.int64 and y.shape in [n] + [x.shape] * tokens),
                labels,
            ),
            (
                "groups",
                g := self.groups,
                g is None or (g.dtype, g.shape) == (np.int64, n),
                f"int64 [{len(x)}]",
            ),
        ):
            if values is not None and not right:
                raise ValueError(
                    f"{name} must be {wanted}, not {values.dtype}"
                    f" {[*values.shape]}{label_fix(values)}"
                )
            if (
                values is not None
                and values.dtype in FLOATS
                and (bad := np.count_nonzero(~np.isfinite(values)))
            ):
                raise ValueError(f"{name} must be finite numbers; {bad} are NaN or infinite")

    def __len__(self) -> int:
        return len(self.x)

    def subset(self, keep: np.ndarray) -> "Split":
        """The samples of ``keep``: indices, or bool [n]."""
        return Split(self.x[keep], self.y[keep], None if self.groups is None else self.groups[keep])

    @property
    def classes(self) -> np.ndarray:
        """The class indices of all labels, int64 [m], without padding; empty for targets of a
        regression.
        """
        if self.y.dtype in FLOATS:
            return np.zeros(0, np.int64)
        return self.y if self.y.ndim == 1 else self.y[self.y != IGNORE]


@dataclass(frozen=True, eq=False)
class FederatedDataset:
    """A data set before it is partitioned.

    Clients get ``train``; the global model is tested on ``test``.

    num_classes: C; the number of components, for targets of a regression.
    optimum: the network's parameters at the global minimum, name → array, if known.

    Raises ValueError for labels outside 0 … num_classes − 1, an empty split, or another number of
    names than classes.
    """

    name: str
    num_classes: int
    train: Split
    test: Split
    class_names: tuple[str, ...] | None = None
    optimum: dict[str, np.ndarray] | None = None

    def __post_init__(self) -> None:
        wrong, classes = "", f"for {self.num_classes} classes"
        for part, split in (("train", self.train), ("test", self.test)):
            if len(split) == 0:
                wrong = f"the {part} split is empty"
            elif split.y.dtype in FLOATS:
                if split.y.shape[1] != self.num_classes:
                    wrong = f"{part} targets have {split.y.shape[1]} components"
            elif not len(split.classes):
                wrong = f"all labels of the {part} split are padding ({IGNORE})"
            elif (low := split.classes.min()) < 0 or split.classes.max() >= self.num_classes:
                wrong = f"{part} labels {low} … {split.classes.max()} {classes}"
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            wrong = f"{len(self.class_names)} class names {classes}"
        if wrong:
            raise ValueError(f"data set {self.name!r}: {wrong}")


def label_fix(y: np.ndarray) -> str:
    """The code that converts these labels to classes, for an error."""
    if y.ndim == 2 and y.shape[1] > 1 and np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all():
        return ": y.argmax(1) makes classes of one-hot rows"
    if y.dtype.kind == "f" and y.size == len(y) and not (y % 1).any():
        return ": y.astype(int).ravel() makes classes of whole numbers"
    return ""
