"""Updates of bounded norm: each client sends Δ_k · min(1, C / ‖Δ_k‖), with C fixed or following a
quantile.

C fixed is the clipping of DP-FedAvg (McMahan et al., ICLR 2018, Algorithm 1, flat clipping).
Adaptive (Andrew et al., NeurIPS 2021, Section 2.1, without noise): each client sends one bit,
whether ‖Δ_k‖ ≤ C. With b̄ the share of ones, C ← C · exp(−η_C (b̄ − γ)), which converges to the
γ-quantile of the norms.

Running statistics of batch norm are not clipped and do not count in the norm: they are no steps,
and often larger.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gcfed.federated.parts import (
    ClientPart,
    ClientStates,
    Download,
    Method,
    Order,
    Params,
    Received,
    Round,
    ServerPart,
    Setup,
    Upload,
    client_norms,
    per_client,
)
from gcfed.utils.checked import Positive, Share, checked


@checked
class ClipUpdate(Method):
    """Clips each client's update; adds its bound and the share of clipped clients to the row of
    metrics.

    Args:
        max_norm: C, or with a quantile the C of the first round.
        quantile: γ, the share of clients whose updates are not clipped; None: C is fixed.
        lr: η_C, of the adaptive C.
    """

    def __init__(
        self, max_norm: Positive = 1.0, *, quantile: Share | None = None, lr: Positive = 0.2
    ) -> None:
        super().__init__(Clip(), Bound(max_norm, quantile, lr))


class Clip(ClientPart):
    order = Order.SHORTENS

    def bind(self, setup: Setup) -> None:
        self._no_steps = setup.no_steps

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        bound = download.extra["clip_update"]["bound"]
        norms = clip_([t for name, t in upload.delta.items() if name not in self._no_steps], bound)
        upload.send("clip_update", {"whole": norms <= bound})


def clip_(tensors_K: Sequence[Tensor], bound: Tensor) -> Tensor:
    """Clips the norm of each client's tensors, ``[K, *shape]``, in place.

    Returns the norms before, ``[K]``.
    """
    norms = client_norms(tensors_K)
    scale = (bound / norms.double()).clamp(max=1.0)
    for t in tensors_K:
        t.mul_(per_client(scale, t).to(t.dtype))
    return norms


class Bound(ServerPart):
    writes = ("clip_update/max_norm", "clip_update/clipped")

    def __init__(self, max_norm: float, quantile: float | None, lr: float) -> None:
        self.max_norm = max_norm
        self.quantile = quantile
        self.lr = lr

    def on_broadcast(self, download: Download, round: Round) -> None:
        # log (C / max_norm)
        self._log = self.server_state("clip_update", {"log": round.zeros()})["log"]
        self._bound = self.max_norm * self._log.exp()
        download.extra["clip_update"] = {"bound": self._bound}

    def uploads(self, round: Round) -> dict[str, Params]:
        return {"clip_update": {"whole": torch.tensor(True)}}

    def sums(self, round: Round) -> Params:
        return {"whole": round.zeros()}  # clients with ‖Δ_k‖ ≤ C

    def on_receive(self, upload: Upload, round: Round) -> Params:
        return {"whole": (upload.extra["clip_update"]["whole"] & upload.finite).sum()}

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        if self.quantile is not None:
            self._log.sub_(self.lr * (round.sums[self]["whole"] / round.num_finite - self.quantile))

    def on_round_end(self, row: dict[str, Any], round: Received) -> None:
        row["clip_update/max_norm"] = float(self._bound)
        if round.usable:
            row["clip_update/clipped"] = 1 - float(round.sums[self]["whole"]) / round.num_finite
