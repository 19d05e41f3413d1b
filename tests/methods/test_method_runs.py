"""Whole runs equal plain loops: several methods at once, and settings that only a whole run
combines.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain import Plain, check
from torch import nn


class Several(Plain):
    """SAM ascends the whole objective with all added losses.

    The proximal gradient uses the weights before.
    """

    rho = 0.3
    tau = 0.7
    mu = 0.4
    beta = 0.8
    temperature = 2.0
    weight = 0.6
    overrides = (
        "algorithm=fedsam",
        f"methods.sam.rho={rho}",
        "+methods.fedlc._target_=gcfed.methods.objective.fedlc.FedLC",
        f"+methods.fedlc.tau={tau}",
        "+methods.prox._target_=gcfed.methods.objective.proximal.Proximal",
        f"+methods.prox.mu={mu}",
        "+methods.ntd._target_=gcfed.methods.objective.fedntd.FedNTD",
        f"+methods.ntd.beta={beta}",
        f"+methods.ntd.tau={temperature}",
        f"+methods.ntd.ce_weight={weight}",
        "client.stack=3",
    )

    def objective(self, w, x, y, k):
        logits = w(x)
        counts = torch.bincount(self.y[self.clients[k]], minlength=10).double()
        loss = F.cross_entropy(logits - self.tau * counts**-0.25, y)
        others = torch.ones_like(logits, dtype=torch.bool).scatter(1, y[:, None], False)
        mine, theirs = (
            (z[others].view(len(y), 9) / self.temperature).log_softmax(1)
            for z in (logits, self.net(x).detach())
        )
        kept = (theirs.exp() * (theirs - mine)).sum(1).mean()
        return loss, self.weight * loss + self.beta * self.temperature**2 * kept

    def backward(self, w, x, y, k):
        here = [p.detach().clone() for p in w.parameters()]
        grads = torch.autograd.grad(self.objective(w, x, y, k)[1], list(w.parameters()))
        norm = sum(g.square().sum() for g in grads).sqrt()
        with torch.no_grad():
            for p, g in zip(w.parameters(), grads, strict=True):
                p += self.rho * g / norm
        loss = super().backward(w, x, y, k)
        with torch.no_grad():
            for p, old, start in zip(w.parameters(), here, self.net.parameters(), strict=True):
                p.copy_(old)
                p.grad += self.mu * (old - start)
        return loss


class Clipped(Plain):
    """The bound follows the 0.2-quantile of the cohort's norms.

    Running statistics and rehearsals do not count.
    """

    last = "wrap"
    model = {"special": True}
    quantile = 0.2
    lr_c = 0.9
    first = 0.3
    overrides = (
        "client.last_batch=wrap",
        "+methods.clip._target_=gcfed.methods.upload.clip_update.ClipUpdate",
        f"+methods.clip.max_norm={first}",
        f"+methods.clip.quantile={quantile}",
        f"+methods.clip.lr={lr_c}",
        "metrics=gap",
        "metrics.gap.every=1",
    )

    def begin(self):
        self.bound = self.first

    def sent(self, t, deltas):
        whole = 0
        for delta in deltas.values():
            norm = sum(delta[name].square().sum() for name in self.names).sqrt()
            whole += float(norm <= self.bound)
            for name in self.names:
                delta[name] *= min(1.0, self.bound / norm)
        share = whole / len(deltas)
        self.row |= {"clip_update/max_norm": self.bound, "clip_update/clipped": 1 - share}
        self.bound *= np.exp(-self.lr_c * (share - self.quantile))


class Deep(nn.Module):
    """Has batch norms at two depths, and layers whose names begin with the names of batch norms."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), nn.BatchNorm2d(3))
        self.body1 = nn.Conv2d(3, 2, 2)
        self.nor = nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.normal = nn.Linear(4, 10)

    def forward(self, x):
        return self.normal(self.norm(self.nor(self.body1(self.body(x).tanh()).flatten(1))).tanh())


class Own(Plain):
    """FedBN: each client keeps its own batch norms.

    The global ones are the mean of the last cohort's.
    """

    last = "wrap"
    model = {"_target_": f"{__name__}.Deep", "norm_policy": "local"}
    overrides = ("client.last_batch=wrap",)

    def begin(self):
        self.kept = {}

    def start(self, w, k):
        w.load_state_dict(self.kept.get(k, {}), strict=False)

    def sent(self, t, deltas):
        for k, delta in deltas.items():
            state = self.net.state_dict()
            self.kept[k] = {
                name: state[name] + d
                for name, d in delta.items()
                if name.startswith(("body.1.", "norm."))
            }


@pytest.mark.parametrize("case", [Several, Clipped, Own])
def test_a_run_equals_the_plain_loop(config, tmp_path, case):
    check(case, config, tmp_path)
