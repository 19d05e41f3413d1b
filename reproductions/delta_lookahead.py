"""FedACG as in GC-Fed's code until August 2025, also for its tables: θ ← θ + Δ.

The clients start at θ + λm, as in FedACG's paper. The server adds Δ, not m, so it needs no momentum
(``server.momentum=0``). This part keeps m and the last θ. m includes what Global GC does to Δ.
"""

import torch

from gcfed.federated.parts import Params, Round
from gcfed.methods.momentum.lookahead import LookAhead


class DeltaLookAhead(LookAhead):
    """Broadcasts θ + λm, with m ← λm + (θ − θ of the last round); m is 0 in the first round."""

    step = "θ + Δ"

    @property
    def server_momentum(self) -> float:
        return 0.0

    def minus_momentum(self, round: Round) -> Params:
        """−m of this round, which it also keeps."""
        theta = {name: round.server_model[name] for name in self._params}
        previous = self.server_state("previous", theta, zeros=False)
        minus_m = self.server_state("minus_m", theta)
        for name, m in minus_m.items():
            m.mul_(self.momentum).add_(previous[name]).sub_(theta[name])
        torch._foreach_copy_(list(previous.values()), list(theta.values()))
        return minus_m
