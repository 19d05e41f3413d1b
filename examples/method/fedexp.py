"""FedExP: a longer server step where clients disagree (Jhunjhunwala et al., ICLR 2023, Algorithm 1)."""

import torch

from gcfed.federated.method import ServerPart


class FedExP(ServerPart):
    """Δ ← η Δ with η = max(1, Σ_k ‖Δ_k‖² / (2 M (‖Δ‖² + ε))), for M clients. State: none. Bytes: those of the model."""

    def __init__(self, epsilon: float = 1e-3) -> None:
        self.epsilon = epsilon

    def on_broadcast(self, download, round):
        device = next(iter(round.start.values())).device
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # Σ_k ‖Δ_k‖², and M

    def on_receive(self, upload, round):
        square_K = sum(upload.delta[name].double().square().flatten(1).sum(1) for name in self.trained_names)
        self.sums += torch.stack([square_K.where(upload.finite, 0.0).sum(), upload.finite.sum()])

    def on_aggregate_end(self, update, round):
        (sums,) = round.reduce([self.sums])  # over all processes
        square = sum(update[name].double().square().sum() for name in self.trained_names)
        eta = (sums[0] / (2 * sums[1] * (square + self.epsilon))).clamp(min=1.0)
        for name in self.trained_names:
            update[name].mul_(eta)
