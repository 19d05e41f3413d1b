"""Tensors of the server that all clients receive, and that their answers change."""

from gcfed.federated.parts import Download, Params, Round, ServerPart


class SharedTensors(ServerPart):
    """Sends tensors with the shapes of the trained weights. Each client returns as many.

    A subclass changes them in ``on_aggregate_end``. It finds the mean of the clients' answers in
    ``round.extra_means[message]``.

    Attributes:
        message: the name under which server and clients send them.
        shared: the tensors, name → ``[*shape]``. They start at zero and are edited in place.
    """

    def __init__(self, message: str) -> None:
        self.message = message

    def on_broadcast(self, download: Download, round: Round) -> None:
        like = self.trained(round.broadcast_model)
        self.shared = self.server_state("c", like)
        download.extra[self.message] = self.shared

    def uploads(self, round: Round) -> dict[str, Params]:
        return {self.message: self.shared}
