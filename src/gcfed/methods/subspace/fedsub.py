"""Dual variables in the subspace: FedSub (Zhang, Xu and Yuan 2025, arXiv 2509.05213), SSF's
baseline.

    local step   z ← z − η (Pᵀ∇F_k + λ_k/(ητ_k))
    up           b_k = z_τ − z₀
    dual         λ_k⁺ = λ_k + b_k − b̄,   b̄ = mean_{k∈S} b_k
    new P        λ_k ← P_newᵀ P_old λ_k

The server sends b̄ at the end of the round. Everything else is as in
:mod:`~gcfed.methods.subspace.random`.

The rules are those of the authors' published code. With a constant P, full participation and equal
numbers of steps, FedSub is SCAFFOLD in that subspace. But each new P loses the part of λ_k outside
the new subspace. And λ_k has the scale of the ητ_k of its round, so with a decaying η its limit is
slightly off. τ_k is client k's planned number of steps. So a straggler applies only the share of
λ_k for its steps.

In the paper all clients take part in every round. Here an absent client keeps its λ_k and, when it
returns, projects it once from its old P to the present P. Projections through each P in between
would leave almost nothing.
"""

from collections.abc import Mapping

import numpy as np
import torch

from gcfed.federated.parts import (
    ClientStack,
    ClientStates,
    Download,
    KeptState,
    Method,
    Params,
    Received,
    Setup,
    Upload,
    per_client,
)
from gcfed.methods.subspace.random import SubspaceClient, Subspaces, SubspaceServer
from gcfed.utils.checked import Count, PositiveShare, checked
from gcfed.utils.device import on_device


@checked
class FedSub(Method):
    """Adds each client's dual variable to its projected gradients, and updates it with the client's
    drift.

    Args: as :class:`~gcfed.methods.subspace.random.Subspaces`.
    """

    def __init__(self, *, ratio: PositiveShare = 0.2, refresh: Count = 5) -> None:
        spaces = Subspaces(ratio, refresh)
        super().__init__(Duals(spaces), MeanDual(spaces))


class Duals(SubspaceClient):
    keeps = {
        "fedsub": KeptState(
            lambda part, download: {
                name: part.space[name].project(download.broadcast_model[name])
                for name in part.trained_names
            }
        )
    }

    def bind(self, setup: Setup) -> None:
        super().bind(setup)
        self._num_steps = setup.solver.num_steps

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Params:
        duals = own["fedsub"]
        self._refresh(duals, own.version, download)
        like = duals[self.trained_names[0]]
        distance = download.lr * self._num_steps(stack.num_samples)  # ητ_k
        scale = on_device(1 / distance, like.device, like.dtype)
        return {name: dual * per_client(scale, dual) for name, dual in duals.items()}

    def _refresh(self, duals: Params, version: np.ndarray, download: Download) -> None:
        """λ_k ← P_newᵀ P_old λ_k in place, for duals of an earlier P.

        Args:
            version: the round of each client's dual, [K]; −1 where there is none.
        """
        epochs = version // self.spaces.refresh
        for epoch in set(epochs.tolist()) - {-1, download.round_index // self.spaces.refresh}:
            rows = torch.from_numpy(np.flatnonzero(epochs == epoch))
            for name, dual in duals.items():  # draws an old P again, for one tensor at a time
                old = self.spaces.projector(
                    download.seed, epoch, name, download.broadcast_model[name]
                )
                dual[rows] = self.space[name].project(old.lift(dual[rows]))

    def keep(self, upload: Upload, own: ClientStates, download: Download) -> Mapping[str, Params]:
        """λ_k + b_k; ``on_reply`` subtracts b̄.

        A client whose numbers are not finite keeps its λ_k.
        """
        return {"fedsub": own.add("fedsub", upload.delta, upload.finite)}

    def on_reply(
        self, reply: Mapping[str, Params], own: ClientStates, download: Download
    ) -> Mapping[str, Params]:
        """λ_k + b_k − b̄."""
        mean = reply["fedsub"]
        return {"fedsub": {name: dual - mean[name] for name, dual in own["fedsub"].items()}}


class MeanDual(SubspaceServer):
    def on_aggregate_end(self, update: Params, round: Received) -> None:
        round.reply["fedsub"] = self.trained(update)
        super().on_aggregate_end(update, round)
