"""Multi-level branches: FedMLB (Kim et al., ICML 2022, eq. 8).

The network is cut into M stages (``net.stages()``); hybrid path m = 1 … M − 1 uses the client's
stages 1 … m and then the broadcast model's stages, which are frozen but pass the gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gcfed.federated.parts import Batch, ClientPart, ClientStack, Fact, Output, Setup
from gcfed.methods.requirements import class_logits, network_functions, teacher
from gcfed.models.own import batch_norms
from gcfed.utils.checked import Positive, Weight, checked
from gcfed.utils.refusal import Refusal


@checked
class FedMLB(ClientPart):
    """Adds λ₁ times the hybrid paths' mean cross-entropy and λ₂ times their mean KL(hybrid path ‖
    client's network).

    ``ce`` and ``kl`` are λ₁ and λ₂, ``tau`` is the temperature τ of the divergence. As in the
    authors' code, it has no factor τ², and its gradient reaches both the client's network and,
    through its first stages, the hybrid paths.
    """

    recordable = "run"
    reads = {"stages"}
    facts = {Fact.TEACHES}
    needs = [class_logits, network_functions("stages"), teacher]

    def __init__(self, ce: Weight = 1.0, kl: Weight = 1.0, tau: Positive = 1.0) -> None:
        self.ce = ce
        self.kl = kl
        self.tau = tau

    def validate(self, setup: Setup) -> None:
        net = setup.module.net
        others = [
            part.title
            for part in setup.parts
            if isinstance(part, ClientPart) and "features" in part.reads
        ]
        has_dropout = any(isinstance(m, nn.Dropout) and m.p for m in net.modules())
        if others and (has_dropout or batch_norms(net)):
            raise Refusal(
                f"{self.title} and {others[0]} call model={type(net).__name__} twice a step. Batch"
                " statistics would change twice, and dropout would draw two masks: use"
                " model.norm=group and no dropout, or one method."
            )
        if len(net.stages()) < 2:  # type: ignore[operator]
            raise Refusal(
                f"methods.fedmlb needs two stages; model={type(net).__name__} has one: add a layer."
            )

    def local_loss(self, stack: ClientStack, batch: Batch, out: Output) -> Tensor:
        client = (out.logits_KBC / self.tau).log_softmax(-1)
        terms = []
        for m, h in enumerate(out.stages[:-1], start=1):
            logits = stack.reference(h, first=m).logits_KBC
            hybrid = (logits / self.tau).log_softmax(-1)
            divergence = F.kl_div(client, hybrid, reduction="none", log_target=True).sum(-1)
            terms.append(
                batch.mean(
                    self.ce * stack.task.client_losses(logits, batch.y) + self.kl * divergence
                )
            )
        return torch.stack(terms).mean(0)
