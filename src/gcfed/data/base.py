"""A data set as NumPy arrays: images, tokens or vectors, with classes or targets
of a regression.
"""

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from gcfed.tasks import IGNORE
from gcfed.utils.refusal import Refusal

FLOATS = (np.float32, np.float64)


@dataclass(frozen=True, eq=False)
class Split:
    """Samples and labels of one split.

    x: images, uint8 [n, C, H, W]; tokens, uint8 or int32 [n, T]; or vectors, float32 or float64 [n,
        d]. May be mapped.
    y: class indices, int64 [n]. Tokens may have one each, int64 [n, T], with −100 for none. Vectors
        may have targets of a regression, floats [n, C].
    groups: the natural client (writer, domain, speaker) of each sample, int64 [n] or None.

    Raises Refusal for another type or shape, or for floats that are not finite.
    """

    x: ndarray
    y: ndarray
    groups: ndarray | None = None

    def __post_init__(self) -> None:
        self._check_samples()
        self._check_labels()
        self._check_groups()

    @property
    def _are_vectors(self) -> bool:
        return self.x.dtype in FLOATS and self.x.ndim == 2

    @property
    def _are_tokens(self) -> bool:
        return self.x.dtype in (np.uint8, np.int32) and self.x.ndim == 2

    def _check_samples(self) -> None:
        are_images = self.x.dtype == np.uint8 and self.x.ndim == 4
        if not (are_images or self._are_tokens or self._are_vectors):
            wanted = (
                "images, uint8 [n, C, H, W] of 0 … 255, tokens, uint8 or int32 [n, T], or floats"
                " [n, d]"
            )
            raise Refusal(_refusal("samples", wanted, self.x, sample_fix(self.x)))
        _require_finite("samples", self.x)

    def _check_labels(self) -> None:
        n = len(self.x)
        shapes: list[tuple[int, ...]] = [(n,)]
        wanted = f"int64 [{n}]"
        if self._are_tokens:
            shapes.append(self.x.shape)
            wanted += f" or {[*self.x.shape]}"
        if self._are_vectors:
            wanted += f" or floats [{n}, C]"
        are_classes = self.y.dtype == np.int64 and self.y.shape in shapes
        are_targets = self.y.dtype in FLOATS and self.y.ndim == 2 and len(self.y) == n
        if not (are_classes or (are_targets and self._are_vectors)):
            raise Refusal(_refusal("labels", wanted, self.y, label_fix(self.y)))
        _require_finite("labels", self.y)

    def _check_groups(self) -> None:
        groups = self.groups
        if groups is None:
            return
        n = len(self.x)
        if groups.dtype != np.int64 or groups.shape != (n,):
            raise Refusal(_refusal("groups", f"int64 [{n}]", groups))

    def __len__(self) -> int:
        return len(self.x)

    def subset(self, keep: ndarray) -> "Split":
        """The samples of ``keep``: indices, or bool [n]."""
        groups = None if self.groups is None else self.groups[keep]
        return Split(self.x[keep], self.y[keep], groups)

    @property
    def classes(self) -> ndarray:
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

    Raises Refusal for labels outside 0 … num_classes − 1, an empty split, splits of different
    shapes, or another number of names than classes.
    """

    name: str
    num_classes: int
    train: Split
    test: Split
    class_names: tuple[str, ...] | None = None
    optimum: dict[str, ndarray] | None = None

    def __post_init__(self) -> None:
        for part, split in (("train", self.train), ("test", self.test)):
            wrong = self._trouble(part, split)
            if wrong:
                raise Refusal(f"data set {self.name!r}: {wrong}")
        if self.test.x.shape[1:] != self.train.x.shape[1:]:
            raise Refusal(
                f"data set {self.name!r}: training samples have the shape"
                f" {[*self.train.x.shape[1:]]}, test samples {[*self.test.x.shape[1:]]}"
            )
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise Refusal(
                f"data set {self.name!r}: {len(self.class_names)} class names for"
                f" {self.num_classes} classes"
            )

    def _trouble(self, part: str, split: Split) -> str:
        """What is wrong with the labels of a split; empty if nothing is."""
        if len(split) == 0:
            return f"the {part} split is empty"
        if split.y.dtype in FLOATS:
            components = split.y.shape[1]
            fits = components == self.num_classes
            return "" if fits else f"{part} targets have {components} components"
        if not len(split.classes):
            return f"all labels of the {part} split are padding ({IGNORE})"
        low = split.classes.min()
        high = split.classes.max()
        if low >= 0 and high < self.num_classes:
            return ""
        return f"{part} labels {low} … {high} for {self.num_classes} classes"


def _refusal(name: str, wanted: str, values: ndarray, fix: str = "") -> str:
    return f"{name} must be {wanted}, not {values.dtype} {[*values.shape]}{fix}"


def _require_finite(name: str, values: ndarray) -> None:
    if values.dtype not in FLOATS:
        return
    count = np.count_nonzero(~np.isfinite(values))
    if count:
        raise Refusal(f"{name} must be finite numbers; {count} are NaN or infinite")


def sample_fix(x: ndarray) -> str:
    """The code that converts these samples to images, tokens or vectors, for an error."""
    if x.ndim == 2 and x.dtype.kind in "iu":
        return ": x.astype('float32') makes a table of numbers, x.astype('int32') makes tokens"
    if x.ndim == 2 and x.dtype.kind in "bf":
        return ": x.astype('float32') makes a table of numbers"
    if x.ndim not in (3, 4) or x.dtype.kind not in "iufb" or x.size == 0:
        return ""
    low = x.min()
    high = x.max()
    if x.dtype == np.uint8:
        return ": x[:, None] makes images of one channel"
    if low >= 0 and high <= 1:
        return ": (x * 255).round().astype('uint8') makes images"
    if low >= 0 and high <= 255:
        return ": x.round().astype('uint8') makes images"
    if not np.isfinite([low, high]).all() or low == high:
        return ""
    stretched = "(x - x.min()) * (255 / (x.max() - x.min()))"
    return f": ({stretched}).round().astype('uint8') makes images of normalised values"


def label_fix(y: ndarray) -> str:
    """The code that converts these labels to classes, for an error."""
    has_switches = y.ndim == 2 and y.shape[1] > 1 and np.isin(y, (0, 1)).all()
    if has_switches and (y.sum(1) == 1).all():
        return ": y.argmax(1) makes classes of one-hot rows"
    if y.dtype.kind == "f" and y.size == len(y) and not (y % 1).any():
        return ": y.astype(int).ravel() makes classes of whole numbers"
    return ""
