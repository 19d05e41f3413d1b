"""The dual variables of FedSpeed (Sun et al., ICLR 2023, Algorithm 1), without its moves.

    local objective   F_k(w) − ⟨h_k, w⟩ + α/2 ‖w − w₀‖²       α = 1/λ
    client's dual     h_k⁺ = h_k − α (w_k − w₀)
    client sends      ŵ_k = w_k − h_k⁺/α
    server's model    w⁺ = mean_{k∈S} ŵ_k

The server keeps nothing. As in :mod:`~gcfed.methods.correction.feddyn`, the code stores u_k =
−h_k/α. A client then sends ŵ_k − w₀ = 2 Δ_k + u_k, with Δ_k = w_k − w₀.

The authors' code (woodenchild95/FL-Simulator) adds the mean of all N clients' u_k instead, also
those of clients outside the cohort. That is FedDyn. Both agree if all clients take part.

The moves are those of :class:`~gcfed.methods.sharpness.sam.Sam`, a method of its own.
"""

from collections.abc import Mapping
from typing import Literal

import torch

from gcfed.federated.parts import ClientStates, Download, Fact, Method, Params, ServerPart, Upload
from gcfed.methods.correction.feddyn import DynamicPull, UpdateSum
from gcfed.methods.requirements import mean_aggregator, plain_server
from gcfed.utils.checked import Positive, checked


@checked
class FedSpeed(Method):
    """FedDyn's local objective; the global model is the mean of the cohort's corrected models.

    Args:
        alpha: α, 1/λ in the paper.
        duals: whose dual variables correct the global model: those of the ``cohort`` (Algorithm 1),
            or of all ``clients`` (the authors' code).
    """

    def __init__(
        self, alpha: Positive = 0.1, *, duals: Literal["cohort", "clients"] = "cohort"
    ) -> None:
        if duals == "cohort":
            super().__init__(CorrectedUpload(alpha), MeanOfCorrected())
        else:
            super().__init__(DynamicPull(alpha), UpdateSum())


class CorrectedUpload(DynamicPull):
    """Sends ŵ_k − w₀ instead of Δ_k."""

    recordable = "run"
    facts = {*DynamicPull.facts, Fact.EDITS_MEAN}

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        sums = own["feddyn"]
        deltas = [upload.delta[name] for name in sums]
        torch._foreach_mul_(deltas, 2.0)
        torch._foreach_add_(deltas, list(sums.values()))

    def keep(self, upload: Upload, own: ClientStates, download: Download) -> Mapping[str, Params]:
        """Adds the Δ_k of what the server received: (ŵ_k − w₀ − u_k) / 2."""
        deltas = {name: (upload.delta[name] - total) / 2 for name, total in own["feddyn"].items()}
        return {"feddyn": own.add("feddyn", deltas, upload.finite)}


class MeanOfCorrected(ServerPart):
    """States what the server must be: a plain step along the plain mean."""

    needs = [
        plain_server("it sets the model to the mean of the clients' corrected models"),
        mean_aggregator("it averages the cohort's corrected models", uniform=True),
    ]
