"""Clients start at the model after the server's next momentum step: FedACG (Kim et al., CVPR 2024,
Algorithm 1).

The server broadcasts θ + λm instead of θ. With Δ, the clients' mean update relative to it:
m ← λm + Δ, θ ← θ + m. torch's SGD with momentum λ and ``.grad = −Δ`` does these two steps; its
buffer is −m. FedACG adds :class:`~gcfed.methods.objective.proximal.Proximal` around θ + λm.

GC-Fed's code until August 2025 had another step: see ``reproductions/delta_lookahead.py``.
"""

from typing import Any

import torch
from torch.optim import SGD

from gcfed.federated.parts import Download, Fact, Order, Params, Round, ServerPart, Setup
from gcfed.utils.checked import ShareBelow1, checked
from gcfed.utils.refusal import Refusal


@checked
class LookAhead(ServerPart):
    """Broadcasts θ + λm, with m the momentum of the server optimizer; m is 0 in the first round.

    Args:
        momentum: λ; must equal the server optimizer's momentum. The paper: 0.85.
    """

    facts = {Fact.MOVES_START}
    order = Order.MOVES_WEIGHTS  # moves the start, before parts that read the broadcast model
    step = "θ + λm + Δ"  # the server's next model

    def __init__(self, momentum: ShareBelow1 = 0.85) -> None:
        self.momentum = momentum

    @property
    def server_momentum(self) -> float:
        """The momentum that the server optimizer must have."""
        return self.momentum

    def validate(self, setup: Setup) -> None:
        optimizer = setup.server_optimizer_probe
        if not isinstance(optimizer, SGD):
            other = type(optimizer).__name__
            raise Refusal(
                f"methods.lookahead needs server=momentum, not {other}: it reads SGD's momentum."
            )
        needed: dict[str, Any] = {
            "dampening": 0,
            "nesterov": False,
            "weight_decay": 0,
            "maximize": False,
            "lr": 1,
            "momentum": self.server_momentum,
        }
        for key, value in needed.items():
            present = optimizer.defaults[key]
            if present != value:
                raise Refusal(
                    f"methods.lookahead with momentum={self.momentum} needs server.{key}={value},"
                    f" not {present}: the server's step must be θ ← {self.step}."
                )

    def bind(self, setup: Setup) -> None:
        parameters = setup.module.net.named_parameters()
        self._params = {name: p for name, p in parameters if p.requires_grad}

    def on_broadcast(self, download: Download, round: Round) -> None:
        minus_m = self.minus_momentum(round)
        if not minus_m:
            return
        theta = [download.broadcast_model[name] for name in minus_m]
        ahead = torch._foreach_sub(theta, list(minus_m.values()), alpha=self.momentum)
        download.broadcast_model |= dict(zip(minus_m, ahead, strict=True))

    def minus_momentum(self, round: Round) -> Params:
        """−m, the momentum buffer of the server's SGD; empty before its first step."""
        assert round.optimizer is not None
        found: Params = {}
        for name, param in self._params.items():
            state = round.optimizer.state.get(param, {})
            if "momentum_buffer" in state:
                found[name] = state["momentum_buffer"]
        return found
