"""Tensors of the server that all clients get, and that what they send back moves."""

from gcfed.federated.parts import Download, Params, Round, ServerPart


class SharedTensors(ServerPart):
    """Sends tensors like the trained weights, and asks each client for as many in return.

    A subclass moves them in ``on_aggregate_end``, by ``round.extra_means[message]``.

    Attributes:
        control: the tensors, name → ``[*shape]``. They start at zero and are edited in place.
    """

    def __init__(self, message: str) -> None:
        self.message = message

    def on_broadcast(self, download: Download, round: Round) -> None:
        like = self.trained(round.broadcast_model)
        self.control = self.server_state("c", like)
        download.extra[self.message] = self.control

    def uploads(self, round: Round) -> dict[str, Params]:
        return {self.message: self.control}
