"""Not-true distillation: FedNTD (Lee et al., NeurIPS 2022, Algorithm 1)."""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from gcfed.federated.parts import Batch, ClientPart, ClientStack, Fact, Output, Setup
from gcfed.methods.requirements import class_logits, teacher
from gcfed.utils.checked import Positive, Weight, checked

log = logging.getLogger(__name__)


@checked
class FedNTD(ClientPart):
    """Adds β τ² KL(teacher ‖ client) over the C − 1 classes other than the label; the teacher is
    the broadcast model.

    FedNTD's and GC-Fed's code have the factor τ²; FedACG's has not. At τ = 1 they agree.

    Args:
        beta: β, weight of the distillation.
        tau: τ, temperature of both softmaxes.
        ce_weight: weight of the task's loss. FedACG's experiments: 0.7, with β = 0.3.
    """

    recordable = "run"
    facts = {Fact.TEACHES}
    needs = [class_logits, teacher]

    def __init__(self, beta: Weight = 1.0, tau: Positive = 1.0, ce_weight: Weight = 1.0) -> None:
        self.beta = beta
        self.tau = tau
        self.task_weight = ce_weight

    def validate(self, setup: Setup) -> None:
        if setup.data.num_classes < 3:
            log.warning("FedNTD has no effect with two classes: only one class is not the label.")

    def local_loss(self, stack: ClientStack, batch: Batch, out: Output) -> Tensor:
        with torch.no_grad():
            teacher = self._not_true(stack.reference(batch.x).logits_KBC, batch.y)
        client = self._not_true(out.logits_KBC, batch.y)
        divergence = F.kl_div(client, teacher, reduction="none", log_target=True).sum(-1)
        return self.beta * self.tau**2 * batch.mean(divergence)

    def _not_true(self, logits: Tensor, y: Tensor) -> Tensor:
        """Logits ``[…, C]`` and labels ``[…]`` → log-probabilities over the classes other than y,
        ``[…, C − 1]``.
        """
        classes = torch.arange(logits.shape[-1] - 1, device=y.device)
        others = classes + (classes >= y.unsqueeze(-1))  # skips y
        return (logits.gather(-1, others) / self.tau).log_softmax(-1)
