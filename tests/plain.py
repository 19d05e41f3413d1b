"""FedAvg as a plain loop that a test's cases change, one setting each, and compare with ``train(cfg)`` in float64."""

import copy
import itertools

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from test_train_numbers import BATCH, CLIP, DECAY, LR, MOMENTUM, SETTING, WEIGHT_DECAY, draw, normalized, run
from torch import nn

ROUNDS = 4


class Plain:
    """FedAvg; ``self.net`` is the global model, ``self.rows`` what the rows of metrics should say."""

    overrides: tuple[str, ...] = ()
    model: dict | None = None
    n, cohort, extra, last, nesterov, skewed = 8, 4, 0, "keep", False, True

    def __init__(self, net, x, y, clients):
        self.net, self.x, self.y, self.clients = net, x, y.clone(), clients
        self.names, self.rows, self.state = [name for name, _ in net.named_parameters()], [], {}
        self.begin()

    inputs = staticmethod(normalized)

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
                y = self.y[batch]
                seen += [self.backward(w, self.inputs(self.x[batch]), y, k).item()] * int((y >= 0).sum())
                samples += len(batch)
                self.correct(w, k)
                nn.utils.clip_grad_norm_(w.parameters(), CLIP)
                optimizer.step()
                steps[k] += 1
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


def check(case, config, folder):
    """Runs ``train(cfg)`` and the plain loop of a case: equal weights, equal rows."""
    overrides = (
        *(word for word in SETTING if "alpha" not in word or case.skewed), f"rounds={ROUNDS}",
        f"participation.num_clients={case.n}", f"participation.per_round={case.cohort}", "data.limit_train=120",
        "data.limit_test=20", "gc=none", *(() if case.model else ["model.hidden=[7]"]), *case.overrides,
    )  # fmt: skip
    result, first = run(config, folder, *overrides, net=case.model)
    train, saved = result.trainer.datamodule.dataset.train, np.load(folder / "partition.npz")
    limited = np.sort(draw("limit_train").choice(len(train), 120, replace=False)) if len(train) > 120 else slice(None)
    x, y = (torch.from_numpy(values[limited]) for values in (train.x, train.y))
    plain = case(first, x, y, np.split(saved["indices"], saved["offsets"][1:-1]))
    for t in range(result.loop.rounds):
        plain.round(t)
    for name, value in result.module.net.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, plain.net.state_dict()[name], rtol=0, atol=1e-11, msg=name)
    written = pd.read_csv(folder / "metrics.csv")[list(plain.rows[0])]
    np.testing.assert_allclose(written, pd.DataFrame(plain.rows), rtol=0, atol=1e-9)
