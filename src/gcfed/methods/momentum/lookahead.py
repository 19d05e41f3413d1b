"""Clients start at the model after the server's next momentum step: FedACG (Kim et al., CVPR 2024,
Algorithm 1).

The server broadcasts θ + λm instead of θ. With Δ, the clients' mean update relative to it: m ← λm +
Δ, θ ← θ + m. torch's SGD with momentum λ and ``.grad = −Δ`` does these two steps; its buffer is −m.
FedACG adds
:class:`~gcfed.methods.objective.proximal.Proximal` around θ + λm.

Until August 2025, also for its tables, GC-Fed's code used θ ← θ + Δ with m as above.
``update=delta`` with a server without momentum does this. This part then keeps m and the last θ;
its m includes what Global GC does to Δ.
"""

from typing import Any, Literal

import torch
from torch.optim import SGD

from gcfed.federated.parts import Download, Order, Params, Round, ServerPart, Setup
from gcfed.optim.partial import probe_optimizer
from gcfed.utils.checked import ShareBelow1, checked


@checked
class LookAhead(ServerPart):
    """Broadcasts θ + λm, with m the momentum of the server optimizer; m is 0 in the first round.

    Args:
        momentum: λ; must equal the server optimizer's momentum. The paper: 0.85.
        update: what is added to θ: ``momentum``, m (the paper); ``delta``, Δ only.
    """

    facts = {"moves the start"}
    order = Order.MOVES_WEIGHTS  # moves the start, before parts that read the broadcast model

    def __init__(
        self, momentum: ShareBelow1 = 0.85, update: Literal["momentum", "delta"] = "momentum"
    ) -> None:
        self.momentum, self.update = momentum, update

    def validate(self, setup: Setup) -> None:
        server = probe_optimizer(setup.module.server)
        if not isinstance(server, SGD):
            other = type(server).__name__
            raise ValueError(
                f"methods.lookahead needs server=momentum, not {other}: it reads SGD's momentum."
            )
        needed: dict[str, Any] = {
            "dampening": 0,
            "nesterov": False,
            "weight_decay": 0,
            "maximize": False,
        }
        needed |= {"lr": 1, "momentum": self.momentum if self.update == "momentum" else 0}
        for key, value in needed.items():
            if (present := server.defaults[key]) != value:
                step = f"θ ← θ + {'λm + Δ' if self.update == 'momentum' else 'Δ'}"
                own = f"methods.lookahead with momentum={self.momentum} and update={self.update}"
                raise ValueError(
                    f"{own} needs server.{key}={value}, not {present}: the server's step must be"
                    f" {step}."
                )
        self._params = {n: p for n, p in setup.module.net.named_parameters() if p.requires_grad}

    def on_broadcast(self, download: Download, round: Round) -> None:
        minus_m = self._own_momentum(round) if self.update == "delta" else self._of_server(round)
        if minus_m:
            theta = [download.model[name] for name in minus_m]
            ahead = torch._foreach_sub(theta, list(minus_m.values()), alpha=self.momentum)
            download.model |= dict(zip(minus_m, ahead, strict=True))

    def _of_server(self, round: Round) -> Params:
        """−m, the momentum buffer of the server's SGD; empty before its first step."""
        assert round.server is not None
        state = {name: round.server.state.get(p, {}) for name, p in self._params.items()}
        return {
            name: own["momentum_buffer"] for name, own in state.items() if "momentum_buffer" in own
        }

    def _own_momentum(self, round: Round) -> Params:
        """−m, with m ← λm + (θ − θ of the last round)."""
        theta = {name: round.start[name] for name in self._params}
        previous, minus_m = (
            self.server_state("previous", theta, zeros=False),
            self.server_state("minus_m", theta),
        )
        for name, m in minus_m.items():
            m.mul_(self.momentum).add_(previous[name]).sub_(theta[name])
        torch._foreach_copy_(list(previous.values()), list(theta.values()))
        return minus_m
