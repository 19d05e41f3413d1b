"""What labels mean: the loss of an output, and what a test reports. ``task`` in the config; the data set chooses."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gcfed.data.base import IGNORE
from gcfed.data.batch import Batch


class Task(Protocol):
    """What the solver and the test ask of a task; ``[…]`` stands for any leading axes of samples.

    Attributes:
        columns: the keys of :meth:`scores`.
        has_classes: whether labels are classes and outputs their logits.
    """

    columns: tuple[str, ...]
    has_classes: bool

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of every label, outputs ``[…, C]`` → ``[…]``."""
        ...

    def mean_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Each client's mean over the real labels of its batch, outputs ``[n, B, …, C]`` → ``[n]``."""
        ...

    def scores(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """What a test averages over the real labels, name → ``[…]``."""
        ...

    def real(self, y: Tensor) -> Tensor:
        """Which labels are no padding, bool ``[…]``."""
        ...


class Classification:
    """Cross-entropy of classes: logits ``[…, C]``, labels int64 ``[…]``; a negative label is padding."""

    columns: tuple[str, ...] = ("test/acc", "test/loss")
    has_classes = True

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Logits ``[…, C]`` → ``[…]``; 0 where the label is padding."""
        losses = F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none", ignore_index=IGNORE)
        return losses.view(y.shape)

    def mean_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        if len(outputs) > 1 or batch.mask is not None:
            return batch.mean(self.losses(outputs, batch.y))
        # One client with whole batches: torch's own mean saves four nodes of the graph, 0.1 ms of a step.
        return F.cross_entropy(outputs.squeeze(0), batch.y.squeeze(0)).unsqueeze(0)

    def scores(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        right = (outputs.argmax(-1) == y).float()
        return {"test/acc": right, "test/loss": self.losses(_at_least_float32(outputs), y)}

    def real(self, y: Tensor) -> Tensor:
        return y >= 0


class SquaredError:
    """Regression: outputs and labels ``[…, C]``, the loss ½‖output − label‖² (SSF, equation 130, without its ridge).

    Where a data set knows its optimum (``FederatedDataset.optimum``), ``metrics=relative_error`` adds the distance of
    the global model to it, ``test/relative_error``, to each round.
    """

    columns: tuple[str, ...] = ("test/loss",)
    has_classes = False
    scale: Tensor | float = 1.0  # of each target, ``[C]``, in the user's units: what it was divided by

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """``[…, C]`` → ``[…]``."""
        return (outputs - y).square().sum(-1) / 2

    def mean_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        return batch.mean(self.losses(outputs, batch.y))

    def scores(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"test/loss": self.losses(_at_least_float32(outputs), y)}

    def real(self, y: Tensor) -> Tensor:
        return torch.ones(y.shape[:-1], dtype=torch.bool, device=y.device)


def _at_least_float32(outputs: Tensor) -> Tensor:
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


CLASSIFICATION = Classification()
