"""Clients start where the server's momentum is about to carry the model.

FedACG (Kim et al., CVPR 2024, Algorithm 1): θ + λm goes down in the place of θ, and with Δ the mean of the clients'
updates relative to it, m ← λm + Δ, θ ← θ + m. The second half is torch's SGD with momentum λ on ``.grad = −Δ``, whose
buffer is −m; FedACG adds :class:`~gcfed.methods.proximal.Proximal` around θ + λm. State: the server optimizer's. Bytes:
those of the model, one message each way.
"""

import torch
from torch.optim import SGD

from gcfed.federated.method import FederatedMethod, Setup
from gcfed.federated.round import Round
from gcfed.optim.partial import probe_optimizer
from gcfed.utils.number import number


class LookAhead(FederatedMethod):
    """Broadcasts θ + λm, with m the momentum of the server optimizer; m is 0 in the first round.

    Args:
        momentum: λ ∈ [0, 1), which must be the server optimizer's; the paper: 0.85.

    Raises:
        ValueError: λ outside [0, 1); at ``validate``, a server optimizer that is not SGD with learning rate 1 and this
            momentum, or a second look-ahead.
    """

    def __init__(self, momentum: float = 0.85) -> None:
        self.momentum = number("methods.lookahead.momentum", momentum, 0, 1, below=True)
        self._names: list[str] = []

    def validate(self, setup: Setup) -> None:
        if sum(isinstance(m, LookAhead) for m in setup.methods) > 1:
            raise ValueError("methods: two LookAheads would look ahead twice. Keep one of them.")
        server = probe_optimizer(setup.module.server)
        if not isinstance(server, SGD):
            raise ValueError(
                f"methods.lookahead needs server=momentum, not {type(server).__name__}: it reads the momentum of SGD."
            )
        needed = {
            "lr": 1, "momentum": self.momentum, "dampening": 0, "nesterov": False, "weight_decay": 0, "maximize": False,
        }  # fmt: skip
        for key, value in needed.items():
            if (present := server.defaults[key]) != value:
                raise ValueError(
                    f"methods.lookahead.momentum={self.momentum} needs server.{key}={value}, not {present}: the server "
                    "must arrive where clients were told it would go, θ ← θ + λm + Δ."
                )
        self._names = [name for name, _ in setup.module.net.named_parameters()]

    def on_broadcast(self, round: Round) -> None:
        assert round.server is not None
        params = round.server.param_groups[0]["params"]
        minus_m = {
            name: round.server.state[p]["momentum_buffer"]
            for name, p in zip(self._names, params, strict=True)
            if "momentum_buffer" in round.server.state.get(p, {})
        }
        if minus_m:
            ahead = torch._foreach_sub([round.start[n] for n in minus_m], list(minus_m.values()), alpha=self.momentum)
            round.start |= dict(zip(minus_m, ahead, strict=True))
