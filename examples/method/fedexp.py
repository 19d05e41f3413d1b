"""FedExP: a longer server step where clients disagree (Jhunjhunwala et al., ICLR 2023, Algorithm
1).
"""

from gcfed.federated.parts import ServerPart


class FedExP(ServerPart):
    """Δ ← η Δ with η = max(1, Σ_k ‖Δ_k‖² / (2 M (‖Δ‖² + ε))), for M clients.

    State: none. Bytes: those of the model.
    """

    def __init__(self, epsilon: float = 1e-3) -> None:
        self.epsilon = epsilon

    def sums(self, round):
        return {"squares": round.zeros()}  # Σ_k ‖Δ_k‖², over all processes

    def on_receive(self, upload, round):
        square_K = sum(
            upload.delta[name].double().square().flatten(1).sum(1) for name in self.trained_names
        )
        return {"squares": square_K.where(upload.finite, 0.0).sum()}

    def on_aggregate_end(self, update, round):
        square = sum(update[name].double().square().sum() for name in self.trained_names)
        eta = (
            round.sums[self]["squares"] / (2 * round.num_finite * (square + self.epsilon))
        ).clamp(min=1.0)
        for name in self.trained_names:
            update[name].mul_(eta)
