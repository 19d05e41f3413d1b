"""Whole runs that combine settings of several kinds equal plain loops."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain import LR, MOMENTUM, Plain, check, draw, seeds

from gcfed.tasks import Classification

CLASS_WEIGHTS = [1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 1.0, 0.25, 1.0, 1.5]


class WeightedSmoothed(Classification):
    """torch's mean with weights of classes and smoothed labels."""

    def __init__(self):
        self.weight = torch.tensor(CLASS_WEIGHTS)

    def losses(self, outputs, y):
        return F.cross_entropy(
            outputs, y, self.weight.to(outputs), reduction="none", label_smoothing=0.2
        )

    def mean_losses(self, outputs, batch):
        weights = self.weight.to(outputs)[batch.y]
        return super().mean_losses(outputs, batch) / batch.mean(weights)


class WeightedSmoothedClients(Plain):
    """The server's Adam steps along the mean by samples of the clients that did not drop out."""

    n = 9
    cohort = 5
    last = "drop"
    dropout = 0.35
    tau = 0.05
    overrides = (
        "task._target_=test_combined_runs.WeightedSmoothed",
        "client.last_batch=drop",
        "client.stack=3",
        "aggregator=weighted_mean",
        "server=fedadam",
        "server.lr=0.1",
        "server.betas=[0.8,0.7]",
        f"server.tau={tau}",
        f"participation.faults.dropout={dropout}",
        "rounds=5",
    )

    def begin(self):
        sizes = [len(client) for client in self.clients]
        assert max(sizes) > 2 * min(sizes)
        self.m = {name: torch.zeros_like(p) for name, p in self.net.named_parameters()}
        self.v = {name: torch.full_like(t, self.tau**2) for name, t in self.m.items()}

    def came(self, t, drawn):
        return {k: 10**6 for k in drawn if draw("fault", t, k).random() >= self.dropout}

    def objective(self, w, x, y, k):
        weight = torch.tensor(CLASS_WEIGHTS).double()
        loss = F.cross_entropy(w(x), y, weight, label_smoothing=0.2)
        return loss, loss

    def server_step(self, deltas):
        total = sum(len(self.clients[k]) for k in deltas)
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                delta = torch.zeros_like(p)
                for k, of_client in deltas.items():
                    delta += len(self.clients[k]) / total * of_client[name]
                self.m[name] = 0.8 * self.m[name] + 0.2 * delta
                self.v[name] = 0.7 * self.v[name] + 0.3 * delta**2
                p += 0.1 * self.m[name] / (self.v[name].sqrt() + self.tau)


class ScaffoldYogi(Plain):
    """SCAFFOLD's variates with stragglers, and FedYogi on the server."""

    n = 7
    cohort = 4
    last = "wrap"
    deadline = 3
    tau = 0.1
    overrides = (
        "algorithm=scaffold",
        "client.last_batch=wrap",
        f"client.optimizer.momentum={MOMENTUM}",
        "client.clip_norm=0.4",
        "client.stack=2",
        "server=fedyogi",
        "server.lr=0.2",
        "server.betas=[0.5,0.6]",
        f"server.tau={tau}",
        f"participation.faults.deadline={deadline}",
        "rounds=5",
    )

    def begin(self):
        zeros = {name: torch.zeros_like(p) for name, p in self.net.named_parameters()}
        self.c = dict(zeros)
        self.own = {k: dict(zeros) for k in range(self.n)}
        self.m = dict(zeros)
        self.v = {name: torch.full_like(t, self.tau**2) for name, t in zeros.items()}

    def came(self, t, drawn):
        return dict.fromkeys(drawn, self.deadline)

    def correct(self, w, k):
        for name, p in w.named_parameters():
            p.grad += self.c[name] - self.own[k][name]

    def sent(self, t, deltas):
        """With momentum β a client moves by Σ_s (1 − β^(τ − s)) / (1 − β) steps."""
        changes = []
        for k, delta in deltas.items():
            steps = sum(
                (1 - MOMENTUM ** (self.steps[k] - s)) / (1 - MOMENTUM) for s in range(self.steps[k])
            )
            change = {}
            for name in self.names:
                change[name] = -self.c[name] - delta[name] / (steps * self.lr)
            changes.append(change)
            self.own[k] = {name: self.own[k][name] + change[name] for name in self.names}
        for name in self.names:
            self.c[name] = self.c[name] + sum(change[name] for change in changes) / self.n

    def server_step(self, deltas):
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                delta = sum(of_client[name] for of_client in deltas.values()) / len(deltas)
                self.m[name] = 0.5 * self.m[name] + 0.5 * delta
                sign = (self.v[name] - delta**2).sign()
                self.v[name] = self.v[name] - 0.4 * delta**2 * sign
                p += 0.2 * self.m[name] / (self.v[name].sqrt() + self.tau)


class PoissonCohorts(Plain):
    """Each client takes part with the same probability, so that ``cohort`` do on average."""

    def drawn(self, t):
        rng = draw("cohort", t)
        many = rng.binomial(self.n, self.cohort / self.n)
        return np.sort(rng.choice(self.n, many, replace=False, shuffle=False)).tolist()


class PrivateWithDropouts(PoissonCohorts):
    """DP-FedAvg with clients that drop out, a cosine of rates and a server with momentum."""

    n = 8
    cohort = 3
    dropout = 0.3
    bound = 0.05
    sigma = 0.4
    overrides = (
        "algorithm=fedavgm",
        "server.lr=0.7",
        "server.momentum=0.5",
        "client.lr_decay=1.0",
        "client.lr_cosine=6",
        "client.stack=2",
        "privacy=client_dp",
        f"privacy.max_norm={bound}",
        f"privacy.noise_multiplier={sigma}",
        f"participation.faults.dropout={dropout}",
        "rounds=6",
    )

    def begin(self):
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.7, momentum=0.5)

    def rate(self, t):
        return LR * (1 + math.cos(math.pi * t / 6)) / 2

    def came(self, t, drawn):
        return {k: 10**6 for k in drawn if draw("fault", t, k).random() >= self.dropout}

    def server_step(self, deltas):
        noise = torch.Generator()
        noise.manual_seed(int(seeds("privacy", self.t).generate_state(1, np.uint64)[0] >> 1))
        total = {name: torch.zeros_like(p) for name, p in self.net.named_parameters()}
        for delta in deltas.values():
            norm = sum(delta[name].square().sum() for name in self.names).sqrt().item()
            for name in self.names:
                total[name] += delta[name] * min(1.0, self.bound / norm)
        for name, p in self.net.named_parameters():
            random = torch.randn(p.shape, generator=noise, dtype=torch.float64)
            p.grad = -(total[name] + self.sigma * self.bound * random) / self.cohort
        self.optimizer.step()


class TrimmedAfterProximal(Plain):
    """FedProx with Nesterov's momentum, a coordinate-wise trimmed mean and FedAdagrad."""

    n = 9
    cohort = 7
    nesterov = True
    mu = 0.6
    tau = 0.02
    last = "drop"
    overrides = (
        "algorithm=fedprox",
        f"methods.proximal.mu={mu}",
        "+client.optimizer.nesterov=true",
        "client.last_batch=drop",
        "client.stack=4",
        "aggregator=trimmed_mean",
        "aggregator.hostile=0.2",
        "server=fedadagrad",
        "server.lr=0.05",
        "server.beta1=0.3",
        f"server.tau={tau}",
        "rounds=4",
    )

    def begin(self):
        self.m = {name: torch.zeros_like(p) for name, p in self.net.named_parameters()}
        self.v = {name: torch.full_like(t, self.tau**2) for name, t in self.m.items()}

    def correct(self, w, k):
        start = dict(self.net.named_parameters())
        for name, p in w.named_parameters():
            p.grad += self.mu * (p.detach() - start[name].detach())

    def server_step(self, deltas):
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                values = torch.stack([delta[name] for delta in deltas.values()]).sort(0).values
                delta = values[2:-2].mean(0)
                self.m[name] = 0.3 * self.m[name] + 0.7 * delta
                self.v[name] = self.v[name] + delta**2
                p += 0.05 * self.m[name] / (self.v[name].sqrt() + self.tau)


class LastUpdatesOfFewClients(PoissonCohorts):
    """FedVARP with Poisson cohorts, some of which are empty, a deadline and FedYogi."""

    n = 8
    cohort = 1
    deadline = 4
    tau = 0.05
    overrides = (
        "algorithm=fedvarp",
        "client.stack=2",
        "server=fedyogi",
        "server.lr=0.1",
        "server.betas=[0.4,0.7]",
        f"server.tau={tau}",
        "participation=poisson",
        f"participation.faults.deadline={deadline}",
        "rounds=9",
    )

    def begin(self):
        zeros = {name: torch.zeros_like(p) for name, p in self.net.named_parameters()}
        self.table = {k: dict(zeros) for k in range(self.n)}
        self.m = dict(zeros)
        self.v = {name: torch.full_like(t, self.tau**2) for name, t in zeros.items()}
        sizes = [len(self.drawn(t)) for t in range(9)]
        assert 0 in sizes
        assert max(sizes) > 1

    def came(self, t, drawn):
        return dict.fromkeys(drawn, self.deadline)

    def server_step(self, deltas):
        if not deltas:
            return
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                mean = sum(own[name] for own in self.table.values()) / self.n
                change = sum(deltas[k][name] - self.table[k][name] for k in deltas) / len(deltas)
                delta = mean + change
                self.m[name] = 0.4 * self.m[name] + 0.6 * delta
                sign = (self.v[name] - delta**2).sign()
                self.v[name] = self.v[name] - 0.3 * delta**2 * sign
                p += 0.1 * self.m[name] / (self.v[name].sqrt() + self.tau)
        for k, delta in deltas.items():
            self.table[k] = {name: delta[name].clone() for name in self.names}


class DynamicWithDropouts(Plain):
    """FedDyn with clients that drop out and others that do a part of their steps."""

    n = 7
    cohort = 4
    last = "wrap"
    alpha = 0.4
    dropout = 0.4
    deadline = 3
    overrides = (
        "algorithm=feddyn",
        f"methods.feddyn.alpha={alpha}",
        "client.last_batch=wrap",
        "client.stack=3",
        f"participation.faults.dropout={dropout}",
        f"participation.faults.deadline={deadline}",
        "rounds=6",
    )

    def begin(self):
        zeros = {name: torch.zeros_like(p) for name, p in self.net.named_parameters()}
        self.h = dict(zeros)
        self.own = {k: dict(zeros) for k in range(self.n)}

    def came(self, t, drawn):
        return {k: self.deadline for k in drawn if draw("fault", t, k).random() >= self.dropout}

    def correct(self, w, k):
        start = dict(self.net.named_parameters())
        for name, p in w.named_parameters():
            p.grad += self.alpha * (p.detach() - start[name].detach()) - self.own[k][name]

    def server_step(self, deltas):
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                total = sum(delta[name] for delta in deltas.values())
                self.h[name] = self.h[name] - self.alpha / self.n * total
                p += total / len(deltas) - self.h[name] / self.alpha
        for k, delta in deltas.items():
            for name in self.names:
                self.own[k][name] = self.own[k][name] - self.alpha * delta[name]


CASES = [
    WeightedSmoothedClients,
    ScaffoldYogi,
    PrivateWithDropouts,
    TrimmedAfterProximal,
    LastUpdatesOfFewClients,
    DynamicWithDropouts,
]


@pytest.mark.filterwarnings("ignore:Secure RNG")
@pytest.mark.parametrize("case", CASES)
def test_a_run_equals_the_plain_loop(config, tmp_path, case):
    check(case, config, tmp_path)
