"""The samples of one local step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Batch:
    """One local step's samples of the n active clients.

    x: inputs, ``[n, B, *input]``.
    y: labels, ``[n, B]``, of sequences ``[n, B, T]``, where a negative one is padding, or to regress on ``[n, B, C]``.
    mask: 1 where a label is real and 0 where it is padding, in the shape of the labels; None where all are real.
    count: real labels of each client, ``[n]``.
    rows: 1 where a sample is real and 0 where it is padding, ``[n, B]``; None where all are real.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None
    count: Tensor
    rows: Tensor | None = None

    def mean(self, values_KB: Tensor) -> Tensor:
        """Each client's mean over its real labels, a value for each label → ``[n]``."""
        if self.mask is None:
            return values_KB.flatten(1).mean(1)
        return (values_KB * self.mask).flatten(1).sum(1) / self.count
