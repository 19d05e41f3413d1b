"""Dual variables that live in the subspace: FedSub (Zhang, Xu and Yuan 2025, arXiv 2509.05213), SSF's opponent.

    local step   z ← z − η (Pᵀ∇F_k + λ_k/(ητ_k))                                  everything else: see subspace.py
    up           b_k = z_τ − z₀
    dual         λ_k⁺ = λ_k + b_k − b̄,   b̄ = mean_{k∈S} b_k
    new P        λ_k ← P_newᵀ P_old λ_k

The rules are those of the authors' published code. λ_k/(ητ) settles at Pᵀ(∇F − ∇F_k), what SCAFFOLD adds; with a P that
stays, all clients in every round and equal numbers of steps, FedSub is SCAFFOLD in that subspace. But at each new P the
part of λ_k outside the new subspace is lost.

λ_k has the scale of the ητ_k that made it: where η decays or τ_k differs among clients, it settles a little aside.

There all clients take part in every round and turn λ_k at every change of P. Here one that was away keeps its λ_k and
turns it once, from the P in which it is written to the present one: turned through each P in between, almost nothing
would be left of it. ``update_absent`` applies the authors' rules to it instead, with b_k = 0: λ_k ← λ_k − b̄ in every
round, turned at every change of P. What all clients lose then is one vector a on the server, a ← a − b̄, and
λ_k = a + (what k's own b_k add up to), so the bytes stay the same. With new projectors every 5 rounds it diverges at
r/d = 0.5 on SSF's matrix regression, as FedSub does in SSF's paper: the b̄ in every dual are a momentum, which only the
turns wear off.

State: λ_k, r-sized, in the clients' store; a, r-sized, on the server. Bytes: z₀ down and b_k up, r/d of the model each;
b̄ a client reads off the model's next state.
"""

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.aggregate import Upload
from gcfed.federated.method import Setup
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack, Params, per_client
from gcfed.methods.requirements import exact_store
from gcfed.methods.subspace import SubspaceMethod
from gcfed.utils.device import on_device
from gcfed.utils.number import flag


class FedSub(SubspaceMethod):
    """Adds each client's dual variable to its projected gradients, and to the dual what its drift was.

    Args:
        update_absent: clients that sit a round out take the authors' rules too, with b_k = 0; false: they keep λ_k.
    """

    _key, _title = "methods.fedsub", "FedSub"

    def __init__(self, *, ratio: float = 0.2, refresh: int = 5, update_absent: bool = False) -> None:
        super().__init__(ratio=ratio, refresh=refresh)
        self.update_absent = flag("methods.fedsub.update_absent", update_absent)
        self._dual: Params = {}

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        self.store = setup.stores.open("fedsub")
        exact_store(self.store, self._title)

    def on_broadcast(self, round: Round) -> None:
        super().on_broadcast(round)
        self._trained: list[tuple[np.ndarray, Tensor]] = []  # clients that this process trained, and which are finite
        if self.update_absent:
            self._absent = self.server_state("absent", self.coordinates)
            before, now = (round.index - 1) // self.refresh, round.index // self.refresh
            if before not in (-1, now):
                for name, dual in self._absent.items():
                    dual.copy_(self.space[name].project(self.projector(name, before, round).lift(dual)))

    def on_clients_start(self, stack: ClientStack, round: Round) -> None:
        self._dual = self.store.read(stack.clients, self.coordinates)
        self._turn(stack.clients, round)
        like = self._dual[self.names[0]]
        scale = on_device(1 / (round.lr * stack.num_steps), like.device, like.dtype)
        absent = self._absent if self.update_absent else {}
        duals = {name: dual + absent[name] if absent else dual for name, dual in self._dual.items()}
        self._correction = {name: dual * per_client(scale, dual) for name, dual in duals.items()}

    def _turn(self, clients: np.ndarray, round: Round) -> None:
        """λ_k ← P_newᵀ P_old λ_k; an old P is drawn again, one tensor at a time."""
        versions = [self.store.version(client) for client in clients.tolist()]
        epochs = np.array([-1 if version is None else version // self.refresh for version in versions])
        now = round.index // self.refresh
        for epoch in set(epochs.tolist()) - {-1, now}:
            rows = torch.from_numpy(np.flatnonzero(epochs == epoch))
            between = range(epoch + 1, now) if self.update_absent else ()
            for name, dual in self._dual.items():
                old = self.projector(name, epoch, round)
                for middle in between:
                    new = self.projector(name, middle, round)
                    dual[rows], old = new.project(old.lift(dual[rows])), new
                dual[rows] = self.space[name].project(old.lift(dual[rows]))

    def on_receive(self, upload: Upload, round: Round) -> None:
        """λ_k + b_k, until b̄ is known; a client whose numbers are not finite keeps its λ_k."""
        for name, dual in self._dual.items():
            dual.add_(torch.where(per_client(upload.finite, dual), upload.delta[name], 0.0))
        self.store.write(upload.clients, self._dual, round)
        self._trained.append((upload.clients, upload.finite))
        self._dual = {}

    def on_aggregate_end(self, update: Params, round: Round) -> None:
        mean = {name: update[name] for name in self.names}
        if self.update_absent:
            for name, dual in self._absent.items():
                dual.sub_(mean[name])
            super().on_aggregate_end(update, round)
            return
        for clients, finite in self._trained:
            duals = self.store.read(clients, mean)
            for name, dual in duals.items():
                dual.sub_(mean[name] * per_client(finite.to(dual.dtype), dual))
            self.store.write(clients, duals, round)
        super().on_aggregate_end(update, round)
        # No process may read a dual in the next round before its last process has written it.
        (written,) = round.reduce([torch.ones(1, device=mean[self.names[0]].device)])
        written.item()
