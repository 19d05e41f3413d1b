"""Batch normalisation that stays on the client: FedBN (Li et al., ICLR 2021, Algorithm 1);
``model.norm_policy=local``.

A client trains with the statistics, scales and shifts from its last round, instead of the broadcast
ones. In the paper clients do not send them. Here the global model is tested and needs some: it gets
the aggregate of the last cohort's, without Global GC.
"""

from gcfed.federated.parts import Setup
from gcfed.methods.personal.kept import KEPT, KeptTensors
from gcfed.methods.requirements import plain_server
from gcfed.models.own import batch_norms


class LocalNorm(KeptTensors):
    """Keeps the tensors of batch norms on the client."""

    method = "model.norm_policy=local"
    keeps = {"batch_norm": KEPT}
    needs = [plain_server("the global model has the mean of the clients' batch norms")]

    def personal_tensors(self, setup: Setup) -> list[str]:
        layers = batch_norms(setup.module.net)
        return [name for name in setup.module.net.state_dict() if name.rpartition(".")[0] in layers]
