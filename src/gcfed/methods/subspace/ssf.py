"""SCAFFOLD in a random subspace: SSF (Zhu et al. 2026, arXiv 2604.25467, Section 3).

    local step    z ← z − η (Pᵀ∇F_k − Pᵀc_k + Pᵀc)
    up            z_τ − z₀ and ḡ_k − Pᵀc_k, where ḡ_k is the mean of the Pᵀ∇F_k
    backfill      c_k⁺ = (I − Π)c_k + Pḡ_k                                         equation 7
                  c⁺   = c + (|S|/N) · mean_{k∈S} (c_k⁺ − c_k)                     equation 6

Everything else is as in :mod:`~gcfed.methods.subspace.random`. c_k and c keep their parts outside
the subspace for later rounds. c is always the mean of all c_k. r = d is SCAFFOLD, option II. ḡ_k
follows from z_τ − z₀ = −ητ (ḡ_k − Pᵀc_k + Pᵀc).

The full variates stay on the CPU. The device holds their projections and one full tensor at a time.
Quantization applies to the first of the two uploads.
"""

from collections.abc import Mapping

import torch

from gcfed.federated.parts import (
    ClientStack,
    ClientStates,
    Download,
    EditedState,
    KeptState,
    Method,
    Params,
    Part,
    Received,
    Round,
    Upload,
    per_client,
)
from gcfed.methods.estimates import gradients_beyond
from gcfed.methods.requirements import uniform_weights
from gcfed.methods.subspace.random import SubspaceClient, Subspaces, SubspaceServer
from gcfed.utils.checked import Count, PositiveShare, checked
from gcfed.utils.device import device_of


@checked
class SSF(Method):
    """Adds Pᵀ(c − c_k) to each client's projected gradients and refreshes both variates inside the
    subspace.

    Args: as :class:`~gcfed.methods.subspace.random.Subspaces`.
    """

    def __init__(self, *, ratio: PositiveShare = 0.2, refresh: Count = 1) -> None:
        spaces = Subspaces(ratio, refresh)
        super().__init__(ProjectedVariates(spaces), ProjectedMean(spaces))


def _on_cpu(part: Part, download: Download) -> Params:
    """Tensors like the parameters that are trained, on the CPU."""
    like = {name: download.broadcast_model[name] for name in part.trained_names}
    return {name: torch.empty(t.shape, dtype=t.dtype) for name, t in like.items()}


class ProjectedVariates(SubspaceClient):
    keeps = {"ssf": KeptState(_on_cpu)}

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Params:
        corrections = {}
        for name, control in download.extra["ssf"].items():
            variate = own["ssf"][name].to(control.device)
            corrections[name] = control - self.space[name].project(variate)
        return corrections

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        super().send(upload, own, download)
        distance = upload.num_steps * download.lr
        upload.send("ssf", gradients_beyond(download.extra["ssf"], upload, distance))

    def keep(self, upload: Upload, own: ClientStates, download: Download) -> Mapping[str, Params]:
        """If the upload does not count, c_k does not change, so that c stays the mean."""
        for name, change in upload.extra["ssf"].items():
            counted = change.where(per_client(upload.finite, change), 0.0)
            own["ssf"][name] += self.space[name].lift(counted).cpu()
        return {"ssf": EditedState(own["ssf"])}


class ProjectedMean(SubspaceServer):
    needs = [*SubspaceServer.needs, uniform_weights("c is the plain mean of the clients' variates")]

    def on_broadcast(self, download: Download, round: Round) -> None:
        super().on_broadcast(download, round)
        self.control = self.server_state("c", _on_cpu(self, download))
        device = device_of(download.broadcast_model)
        self._projected = {}
        for name, control in self.control.items():
            self._projected[name] = self.space[name].project(control.to(device))
        download.extra["ssf"] = self._projected

    def uploads(self, round: Round) -> dict[str, Params]:
        return super().uploads(round) | {"ssf": self._projected}

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        super().on_aggregate_end(update, round)
        share = round.num_finite / round.num_clients
        for name, control in self.control.items():
            change = self.space[name].lift(round.extra_means["ssf"][name])
            control.add_(change.cpu(), alpha=share)
