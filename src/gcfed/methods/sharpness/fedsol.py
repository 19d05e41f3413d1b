"""Local gradients at weights moved along a proximal loss's gradient: FedSOL (Lee et al., CVPR
2024).

The proximal loss is the divergence between the softened outputs of the client and of the broadcast
model w₀; g_p is its gradient. Then w̃ = w + ρ Λ g_p/‖g_p‖, w ← w − η ∇F_k(w̃). A step costs two
passes and a forward pass of w₀.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gcfed.federated.parts import Batch, ClientStack, Fact
from gcfed.methods.estimates import along
from gcfed.methods.requirements import class_logits, teacher, whole_batches
from gcfed.methods.sharpness.sam import Sam
from gcfed.utils.checked import Positive, Weight, checked


@checked
class FedSol(Sam):
    """Computes each client's gradient at w + ρ Λ g_p/‖g_p‖.

    In the first local step of a round, w = w₀, so g_p = 0 and the step is plain SGD.

    Args:
        rho: ρ, how far the weights are moved.
        temperature: softens both outputs of the proximal loss KL(w₀ ‖ w); the authors' code: 3.
        adaptive: Λ is |w − w₀| divided by its norm over the first axis, for each tensor (a unit
            vector for each input). Coordinates that have drifted more move more. False: Λ = 1.
    """

    recordable = "run"
    facts = {Fact.ANCHORS, Fact.TEACHES}
    needs = [class_logits, teacher, whole_batches("its first pass takes all of a batch")]

    def __init__(
        self, rho: Weight = 1.0, *, temperature: Positive = 3.0, adaptive: bool = True
    ) -> None:
        super().__init__(rho)
        self.temperature = temperature
        self.adaptive = adaptive

    def perturbation(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> Sequence[Tensor]:
        with torch.no_grad():
            teacher = (stack.reference(batch.x).logits_KBC / self.temperature).softmax(-1)
            start = [stack.broadcast_model[name] for name in stack.leaves]
            drift = torch._foreach_sub(list(stack.leaves.values()), start)
        student = (stack(batch.x).logits_KBC / self.temperature).log_softmax(-1)
        divergence = batch.mean(F.kl_div(student, teacher, reduction="none").sum(-1))
        grads = list(stack.gradients(divergence).values())
        if self.adaptive:
            # Norms over the outputs, [n, out, …]; the new axis is for scalar parameters.
            units = [F.normalize(d.abs_().unsqueeze(-1), dim=1).squeeze(-1) for d in drift]
            return torch._foreach_mul(along(grads, self.rho), units)
        # At w₀ the proximal gradient is rounding error; do not scale it to norm ρ.
        moved_TK = torch.stack([d.ne(0).reshape(len(d), -1).any(1) for d in drift])
        return along(grads, self.rho * moved_TK.any(0).to(grads[0].dtype))
