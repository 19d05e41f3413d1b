"""SCAFFOLD in a random subspace: SSF (Zhu et al. 2026, arXiv 2604.25467, Section 3).

    local step    z ← z − η (Pᵀ∇F_k − Pᵀc_k + Pᵀc)                               everything else: see subspace.py
    up            z_τ − z₀ and ḡ_k − Pᵀc_k, where ḡ_k is the mean of the Pᵀ∇F_k
    backfill      c_k⁺ = (I − Π)c_k + Pḡ_k                                         equation 7
                  c⁺   = c + (|S|/N) · mean_{k∈S} (c_k⁺ − c_k)                     equation 6

What c_k and c know outside the subspace is kept for the rounds in which it comes back; c is the mean of all c_k at any
time. r = d is SCAFFOLD, option II. ḡ_k is read off z_τ − z₀ = −ητ (ḡ_k − Pᵀc_k + Pᵀc).

State: c_k in full, in the clients' store, and c in full, on the server; both stay on the CPU. On the device there are
their projections, and of full variates one tensor at a time. Bytes: down z₀, Pᵀc and Pᵀc_k (the server keeps both
variates), up the two above; each is r/d of the model, but for tensors of one axis, which go whole. Quantization takes
the first of the two.
"""

import torch

from gcfed.federated.aggregate import Upload
from gcfed.federated.method import Setup
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack, Params, per_client
from gcfed.methods.requirements import exact_store, uniform_weights
from gcfed.methods.subspace import SubspaceMethod
from gcfed.utils.device import on_device


class SSF(SubspaceMethod):
    """Adds Pᵀ(c − c_k) to each client's projected gradients and refreshes both variates inside the subspace."""

    _key, _title = "methods.ssf", "SSF"

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        uniform_weights(setup, self._title, "c is the plain mean of the clients' variates")
        self.store = setup.stores.open("ssf")
        exact_store(self.store, self._title)
        named = dict(setup.module.net.named_parameters())
        self._on_cpu = {name: torch.empty(named[name].shape, dtype=named[name].dtype) for name in self.names}

    def on_broadcast(self, round: Round) -> None:
        super().on_broadcast(round)
        self.control = self.server_state("c", self._on_cpu)
        self._projected = self._project(self.control, round)
        for _ in ("c", "c_k"):
            round.send(self._projected)

    def _project(self, full: Params, round: Round) -> Params:
        """Takes tensors on the CPU to their coordinates on the device, one after the other."""
        return {n: self.space[n].project(full[n].to(round.start[n].device)) for n in self.names}

    def uploads(self, round: Round) -> dict[str, Params]:
        return super().uploads(round) | {"ssf": self._projected}

    def on_clients_start(self, stack: ClientStack, round: Round) -> None:
        own = self._project(self.store.read(stack.clients, self._on_cpu), round)
        self._correction = {name: self._projected[name] - z for name, z in own.items()}

    def on_upload(self, upload: Upload, round: Round) -> None:
        super().on_upload(upload, round)
        like = upload.delta[self.names[0]]
        scale = on_device(-1 / (upload.num_steps * round.lr), like.device, like.dtype)
        deltas = {name: upload.delta[name] for name in self.names}
        upload.send("ssf", {n: (dz * per_client(scale, dz)).sub_(self._projected[n]) for n, dz in deltas.items()})

    def on_receive(self, upload: Upload, round: Round) -> None:
        """Backfills c_k where the upload counts; elsewhere it stays as it was, so that c stays the mean."""
        own = self.store.read(upload.clients, self._on_cpu)
        for name, change in upload.extra["ssf"].items():
            own[name] += self.space[name].lift(change.where(per_client(upload.finite, change), 0.0)).cpu()
        self.store.write(upload.clients, own, round)

    def on_aggregate_end(self, update: Params, round: Round) -> None:
        super().on_aggregate_end(update, round)
        share = round.num_finite / round.num_clients
        for name, control in self.control.items():
            control.add_(self.space[name].lift(round.received["ssf"][name]).cpu(), alpha=share)
