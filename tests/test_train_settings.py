"""``train(cfg)`` in float64 against plain loops: who takes part, attacks, several methods; see ``test_train_numbers``.

Each case is the plain loop of FedAvg, of which it writes anew what its setting changes.
"""

import copy
import itertools
from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from test_train_numbers import BATCH, CLIP, DECAY, LR, MOMENTUM, SETTING, WEIGHT_DECAY, draw, normalized, run, seeds
from torch import nn

ROUNDS = 4


class Plain:
    """FedAvg; ``self.net`` is the global model, ``self.rows`` what the rows of metrics should say."""

    overrides: tuple[str, ...] = ()
    model: dict | None = None
    n, cohort, extra, last, nesterov = 8, 4, 0, "keep", False

    def __init__(self, net, x, y, clients):
        self.net, self.x, self.y, self.clients = net, x, y.clone(), clients
        self.names, self.rows, self.state = [name for name, _ in net.named_parameters()], [], {}
        self.begin()

    def begin(self): ...

    def drawn(self, t):
        many = self.cohort + self.extra
        return np.sort(draw("cohort", t).choice(self.n, many, replace=False, shuffle=False)).tolist()

    def came(self, t, drawn):
        """Whose uploads count, and after how many steps each stops."""
        return dict.fromkeys(drawn, 10**6)

    def batches(self, k, t):
        own = self.clients[k]
        if self.last == "wrap":
            own = np.resize(own, -(-len(own) // BATCH) * BATCH)
        for epoch in draw("shuffle", t, k).permuted([own] * 2, axis=1):
            parts = np.split(epoch, range(BATCH, len(epoch), BATCH))
            yield from parts[:-1] if self.last == "drop" and len(parts) > 1 and len(parts[-1]) < BATCH else parts

    def objective(self, w, x, y, k):
        """The task's loss and what else is descended."""
        loss = F.cross_entropy(w(x), y)
        return loss, loss

    def backward(self, w, x, y, k):
        loss, objective = self.objective(w, x, y, k)
        objective.backward()
        return loss

    def start(self, w, k): ...

    def correct(self, w, k):
        """Changes the gradients of a local step."""

    def sent(self, t, deltas): ...

    def round(self, t):
        self.t, self.lr, drawn = t, LR * DECAY**t, self.drawn(t)
        came = self.came(t, drawn)
        deltas, losses, steps, samples = {}, [], {}, 0
        for k, most in came.items():
            w = copy.deepcopy(self.net).train()
            self.start(w, k)
            optimizer = torch.optim.SGD(
                w.parameters(), lr=self.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=self.nesterov
            )
            seen, steps[k] = [], 0
            for batch in itertools.islice(self.batches(k, t), most):
                optimizer.zero_grad()
                seen += [self.backward(w, normalized(self.x[batch]), self.y[batch], k).item()] * len(batch)
                self.correct(w, k)
                nn.utils.clip_grad_norm_(w.parameters(), CLIP)
                optimizer.step()
                steps[k] += 1
            samples += len(seen)
            losses.append(np.mean(seen))
            before = self.net.state_dict()
            deltas[k] = {n: v - before[n] for n, v in w.state_dict().items() if v.is_floating_point()}
        self.steps = steps
        self.row = {"train/loss": np.mean(losses) if losses else np.nan, "train/clients": len(came),
                    "train/steps": sum(steps.values()), "train/samples": samples}  # fmt: skip
        self.sent(t, deltas)
        state = self.net.state_dict()
        for name in next(iter(deltas.values()), {}):
            state[name] += sum(delta[name] for delta in deltas.values()) / len(deltas)
        self.rows.append(self.row)


class Faulty(Plain):
    """Of those drawn the first to finish count; who drops out never finishes."""

    n, cohort, dropout, stragglers, deadline, extra = 10, 3, 0.4, 0.6, 5, 3
    overrides = (
        *(f"participation.faults.{key}={value}" for key, value in
          {"dropout": dropout, "stragglers": stragglers, "deadline": deadline, "extra": extra}.items()),
        "participation.per_round=3", "client.stack=2", "rounds=8",
    )  # fmt: skip

    def drawn(self, t):
        return np.sort(
            draw("cohort", t).choice(self.n, self.cohort + self.extra, replace=False, shuffle=False)
        ).tolist()

    def came(self, t, drawn):
        done, times = {}, {}
        for k in drawn:
            planned = sum(1 for _ in self.batches(k, t))
            done[k] = min(planned, self.deadline or planned)
            slow, part = draw("straggler", t, k).random(2)
            if slow < self.stragglers:
                done[k] = min(done[k], 1 + int(part * planned))
            fate = draw("fault", t, k)
            if fate.random() >= self.dropout:
                times[k] = fate.exponential() * done[k]
        self.planned = {k: sum(1 for _ in self.batches(k, t)) for k in drawn}
        return {k: done[k] for k in sorted(sorted(times, key=times.get)[: self.cohort])}

    def sent(self, t, deltas):
        model = sum(p.numel() for p in self.net.parameters()) * 8
        self.row |= {
            "train/dropped_clients": self.cohort + self.extra - len(deltas), "comm/up_bytes": len(deltas) * model,
            "train/stragglers": sum(self.steps[k] < self.planned[k] for k in deltas),
            "comm/down_bytes": (self.cohort + self.extra) * model,
        }  # fmt: skip


class FaultyDrop(Faulty):
    last, deadline, dropout, extra = "drop", None, 0.0, 2
    overrides = (
        "client.last_batch=drop", "participation.faults.stragglers=0.6", "participation.faults.extra=2",
        "participation.per_round=3",
    )  # fmt: skip


class FaultyWrap(Faulty):
    last, stragglers, extra, cohort, deadline = "wrap", 0.0, 0, 5, 2
    overrides = (
        "client.last_batch=wrap", "participation.faults.dropout=0.4", "participation.faults.deadline=2",
        "participation.per_round=5",
    )  # fmt: skip


class Changing(Plain):
    """Who gives its place gives it to one of those that waited, in the order of their ids."""

    n, live, every, replace, cohort = 9, 6, 1, 0.7, 4
    overrides = (
        "participation=dynamic", "participation.per_round=4", "participation.sampler.live=6",
        "participation.sampler.every=1", "participation.sampler.replace_probability=0.7", "rounds=8",
    )  # fmt: skip

    def drawn(self, t):
        return population(self.n, self.live, self.every, self.replace, self.cohort, t)


def population(n, live, every, replace, cohort, t):
    ids = sorted(draw("population", 0).choice(n, live, replace=False, shuffle=False).tolist())
    for stage in range(1, t // every + 1):
        rng, waiting = draw("population", stage), [k for k in range(n) if k not in ids]
        leaving = rng.permutation([i for i, u in enumerate(rng.random(live)) if u < replace])[: n - live].tolist()
        ranks = rng.choice(n - live, len(leaving), replace=False).tolist() if leaving else []
        gone = [ids[i] for i in leaving]
        ids = sorted([k for k in ids if k not in gone] + [waiting[rank] for rank in ranks])
    return [ids[i] for i in sorted(draw("cohort", t).choice(live, cohort, replace=False, shuffle=False).tolist())]


class Hostile(Plain):
    """Their number is rounded."""

    n, cohort, share = 10, 9, 0.26

    def begin(self):
        self.hostile = set(draw("hostile").choice(self.n, 3, replace=False).tolist())

    def sent(self, t, deltas):
        hostile = {k: deltas[k] for k in deltas if k in self.hostile}
        honest = [deltas[k] for k in deltas if k not in self.hostile]
        self.row["train/hostile_clients"] = len(hostile)
        for k, delta in hostile.items():
            self.craft(t, k, delta, honest, len(hostile))

    def craft(self, t, k, delta, honest, many): ...


class SignFlip(Hostile):
    overrides = ("attack=sign_flip", "attack.clients=0.26", "attack.factor=-1.5", "participation.per_round=9")

    def craft(self, t, k, delta, honest, many):
        for name in delta:
            delta[name] *= -1.5


class Noise(Hostile):
    overrides = ("attack=gaussian", "attack.clients=0.26", "attack.factor=0.7", "participation.per_round=9")

    def craft(self, t, k, delta, honest, many):
        g = torch.Generator().manual_seed(int(seeds("attack", t, k).generate_state(1, np.uint64)[0] >> 1))
        for name, d in delta.items():
            rms = d.square().sum().div(d.numel()).sqrt()
            delta[name] = 0.7 * rms * torch.randn(d.shape, generator=g, dtype=torch.float64)


class Enough(Hostile):
    overrides = ("attack=alie", "attack.clients=0.26", "attack.z=null", "participation.per_round=9")

    def craft(self, t, k, delta, honest, many):
        n, s = len(honest) + many, (len(honest) + many) // 2 + 1 - many
        z = NormalDist().inv_cdf((n - many - s) / (n - many))
        assert z > 0
        for name in delta:
            values = torch.stack([h[name] for h in honest]).numpy()
            delta[name] = torch.from_numpy(values.mean(0) - z * values.std(0))


class Inner(Hostile):
    overrides = ("attack=ipm", "attack.clients=0.26", "attack.epsilon=0.8", "participation.per_round=9")

    def craft(self, t, k, delta, honest, many):
        for name in delta:
            delta[name] = -0.8 * sum(h[name] for h in honest) / len(honest)


class Flipped(Hostile):
    overrides = ("attack=label_flip", "attack.clients=0.26", "participation.per_round=9")

    def begin(self):
        super().begin()
        for k in self.hostile:
            self.y[self.clients[k]] = 9 - self.y[self.clients[k]]


class Nesterov(Plain):
    """SCAFFOLD: c_k⁺ = c_k − c − Δ/(way · η), where one unit of gradient leads as far as ``way``."""

    nesterov = True
    overrides = ("algorithm=scaffold", "+client.optimizer.nesterov=true")

    def begin(self):
        zeros = {name: torch.zeros_like(p) for name, p in self.net.named_parameters()}
        self.own, self.control = {k: copy.deepcopy(zeros) for k in range(self.n)}, zeros

    def correct(self, w, k):
        for name, p in w.named_parameters():
            p.grad += self.control[name] - self.own[k][name]

    def sent(self, t, deltas):
        total = dict.fromkeys(self.names, 0.0)
        for k, delta in deltas.items():
            way = velocity = 0.0
            for _ in range(self.steps[k]):
                velocity = MOMENTUM * velocity + 1
                way += 1 + MOMENTUM * velocity
            for name in self.names:
                change = -self.control[name] - delta[name] / (way * self.lr)
                self.own[k][name] += change
                total[name] += change
        for name in self.names:
            self.control[name] += total[name] / self.n


class Several(Plain):
    """SAM goes up the whole objective, calibrated and with what others add; a gradient's term stays where w was."""

    rho, tau, mu, beta, temperature, weight = 0.3, 0.7, 0.4, 0.8, 2.0, 0.6
    overrides = (
        "algorithm=fedsam", f"methods.sam.rho={rho}", "+methods.fedlc._target_=gcfed.methods.fedlc.FedLC",
        f"+methods.fedlc.tau={tau}", "+methods.prox._target_=gcfed.methods.proximal.Proximal", f"+methods.prox.mu={mu}",
        "+methods.ntd._target_=gcfed.methods.fedntd.FedNTD", f"+methods.ntd.beta={beta}",
        f"+methods.ntd.tau={temperature}", f"+methods.ntd.ce_weight={weight}", "client.stack=3",
    )  # fmt: skip

    def objective(self, w, x, y, k):
        logits = w(x)
        counts = torch.bincount(self.y[self.clients[k]], minlength=10).double()
        loss = F.cross_entropy(logits - self.tau * counts**-0.25, y)
        others = torch.ones_like(logits, dtype=torch.bool).scatter(1, y[:, None], False)
        mine, theirs = (
            (z[others].view(len(y), 9) / self.temperature).log_softmax(1) for z in (logits, self.net(x).detach())
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
    """The bound follows the 0.2-quantile of the cohort's norms; running statistics do not count, nor do rehearsals."""

    last, model, quantile, lr_c, first = "wrap", {"norm": True}, 0.2, 0.9, 0.3
    overrides = (
        "client.last_batch=wrap", "+methods.clip._target_=gcfed.methods.clip_update.ClipUpdate",
        f"+methods.clip.max_norm={first}", f"+methods.clip.quantile={quantile}", f"+methods.clip.lr={lr_c}",
        "metrics=gap", "metrics.gap.every=1", "gc.boundary=fc",
    )  # fmt: skip

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
    """Batch norms at two depths, and layers whose names begin as theirs do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), nn.BatchNorm2d(3))
        self.body1, self.nor, self.norm, self.normal = (
            nn.Conv2d(3, 2, 2), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 10)
        )  # fmt: skip

    def forward(self, x):
        return self.normal(self.norm(self.nor(self.body1(self.body(x).tanh()).flatten(1))).tanh())


class Own(Plain):
    """FedBN: each client goes on with its own batch norms; the global ones are the mean of the last cohort's."""

    last, model = "wrap", {"_target_": f"{__name__}.Deep", "norm_policy": "local"}
    overrides = ("client.last_batch=wrap", "gc.boundary=normal")

    def begin(self):
        self.kept = {}

    def start(self, w, k):
        w.load_state_dict(self.kept.get(k, {}), strict=False)

    def sent(self, t, deltas):
        for k, delta in deltas.items():
            state = self.net.state_dict()
            self.kept[k] = {name: state[name] + d for name, d in delta.items() if name.startswith(("body.1.", "norm."))}


CASES = [
    Own,
    Faulty,
    FaultyDrop,
    FaultyWrap,
    Changing,
    SignFlip,
    Noise,
    Enough,
    Inner,
    Flipped,
    Nesterov,
    Several,
    Clipped,
]


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_plain_loop(config, tmp_path, case):
    overrides = (
        *SETTING, f"rounds={ROUNDS}", f"participation.num_clients={case.n}", f"participation.per_round={case.cohort}",
        "data.limit_train=120", "data.limit_test=20", "gc=none", *(() if case.model else ["model.hidden=[7]"]),
        *case.overrides,
    )  # fmt: skip
    result, first = run(config, tmp_path, *overrides, net=case.model)
    data, saved = result.trainer.datamodule.dataset, np.load(tmp_path / "partition.npz")
    limited = np.sort(draw("limit_train").choice(len(data.train.y), 120, replace=False))
    x, y = (torch.from_numpy(values[limited]) for values in (data.train.x, data.train.y))
    plain = case(first, x, y, np.split(saved["indices"], saved["offsets"][1:-1]))
    for t in range(result.loop.rounds):
        plain.round(t)
    for name, value in result.module.net.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, plain.net.state_dict()[name], rtol=0, atol=1e-11, msg=name)
    written = pd.read_csv(tmp_path / "metrics.csv")[list(plain.rows[0])]
    np.testing.assert_allclose(written, pd.DataFrame(plain.rows), rtol=0, atol=1e-9)
