"""Model-contrastive learning: MOON (Li et al., CVPR 2021, Algorithm 1).

The paper puts a two-layer projection head between features and classifier; here z is the input of
the model's own head, so that all methods use the same network.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from gcfed.federated.parts import (
    Batch,
    ClientPart,
    ClientStack,
    ClientStates,
    Download,
    Fact,
    KeptState,
    Output,
    Params,
    Prepared,
)
from gcfed.methods.requirements import check_learned, network_functions, teacher
from gcfed.utils.checked import Positive, Weight, checked
from gcfed.utils.device import on_device


@checked
class Moon(ClientPart):
    """Adds μ · −log(e^(s_glob/T) / (e^(s_glob/T) + e^(s_prev/T))), with s the cosine between z and
    another model's z.

    The other models are the broadcast model and the client's model from its last round. In a
    client's first round there is no previous model and no term: with the broadcast model instead,
    the gradient would be zero.

    Args:
        mu: μ, weight of the term. The authors' code: 1.
        temperature: T, of both similarities.
    """

    recordable = "stack"
    reads = {"features"}
    facts = {Fact.TEACHES}
    needs = [network_functions("features", "head"), teacher]
    keeps = {
        "moon": KeptState(lambda part, download: download.broadcast_model, starts_at_model=True)
    }

    def __init__(self, mu: Weight = 1.0, temperature: Positive = 0.5) -> None:
        self.mu = mu
        self.temperature = temperature

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared:
        known = own.version >= 0
        if not known.any():
            return {}
        like = next(iter(stack.broadcast_model.values()))
        return {"previous": own["moon"], "known": on_device(known, like.device, like.dtype)}

    def local_loss(self, stack: ClientStack, batch: Batch, out: Output) -> Tensor | None:
        features = check_learned(out, self.title)
        prepared = stack.prepared[self]
        if not prepared:
            return None
        previous = {name: t[: stack.active] for name, t in prepared["previous"].items()}
        known = prepared["known"][: stack.active]
        with torch.no_grad():
            of_global = stack.reference(batch.x, features=True)
            of_previous = stack.reference(batch.x, params=previous, features=True)
        terms = F.softplus(
            (_similarity(features, of_previous) - _similarity(features, of_global))
            / self.temperature
        )
        mean = (
            terms.mean(1) if batch.rows is None else (terms * batch.rows).sum(1) / batch.rows.sum(1)
        )
        return self.mu * known * mean

    def on_clients_end(self, stack: ClientStack, download: Download) -> Mapping[str, Params]:
        """A client whose model has diverged keeps its previous one."""
        return {"moon": stack.full}


def _similarity(features_nBF: Tensor, other: Output) -> Tensor:
    """Cosines between features and those of another network, ``[n, B]``."""
    assert other.features_KBF is not None
    # bfloat16 is too coarse near 1
    at_least = torch.promote_types(features_nBF.dtype, torch.float32)
    return F.cosine_similarity(features_nBF.to(at_least), other.features_KBF.to(at_least), dim=-1)
