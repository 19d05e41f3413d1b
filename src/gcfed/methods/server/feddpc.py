"""Updates orthogonal to the server's last step: FedDPC (Sen and Nag 2025, arXiv 2512.20329),
without its scaling.

    Δ ← Δ − ⟨Δ, s⟩ s/‖s‖²    with s = w_t − w_{t−1}, over all tensors as one vector

s = 0 changes nothing. The paper projects each client's update, scales each residual adaptively, and
averages. We could not confirm the formula of the scaling, so there is none. Then the mean's
residual is the mean of the clients' residuals. s is the step that the server made, with its
optimizer and Global GC.
"""

import torch

from gcfed.federated.parts import Download, Fact, Params, Received, Round, ServerPart
from gcfed.methods.requirements import mean_aggregator


class FedDPC(ServerPart):
    """Removes from the mean update its component along the server's last step; in the first round
    there is none.
    """

    facts = {Fact.EDITS_MEAN}
    needs = [mean_aggregator("it projects the mean instead of each update")]

    def on_broadcast(self, download: Download, round: Round) -> None:
        model = self.trained(round.server_model)
        before = list(self.server_state("before", model, zeros=False).values())
        now = list(model.values())
        self.step = torch._foreach_sub(now, before)
        torch._foreach_copy_(before, now)

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        deltas = list(self.trained(update).values())
        delta_P = torch.cat([t.double().flatten() for t in deltas])
        step_P = torch.cat([t.double().flatten() for t in self.step])
        share = (delta_P @ step_P) / (step_P @ step_P)
        # 0/0 without a last step
        torch._foreach_add_(deltas, self.step, alpha=-float(share.nan_to_num()))
