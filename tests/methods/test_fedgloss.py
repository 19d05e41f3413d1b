"""FedGloSS with SAM on clients and server equals the paper's rule on flat vectors."""

import torch
from harness import make_net, sgd, train_rounds, weights
from plain_reference import batches, cohort, loss_at
from torch.func import grad

from gcfed.methods.fedgloss import FedGloSS
from gcfed.methods.sam import Sam


def test_it_equals_the_plain_loop(federation):
    alpha, rho, lr, net = 0.5, 0.4, 0.1, make_net()
    w, n = weights(net), len(federation.clients)
    h, own, last = torch.zeros_like(w), [torch.zeros_like(w) for _ in range(n)], torch.zeros_like(w)
    for t in range(3):
        start = w - rho * last / last.norm() if t else w
        ends = []
        for k in cohort(federation, t, 3):
            v = start
            for x, y in batches(federation, sgd(), k, t):
                gradient = grad(lambda u, x=x, y=y: loss_at(net, u, x, y))
                g = gradient(v)
                v = v - lr * (gradient(v + 0.3 * g / g.norm()) - own[k] + alpha * (v - start))
            own[k] = own[k] - alpha * (v - start)
            ends.append(v - start)
        last = sum(ends) / 3
        h = h - alpha * sum(ends) / n
        w = w + last - h / alpha
    methods = [Sam(0.3), FedGloSS(rho, alpha=alpha)]
    found = train_rounds(make_net(), federation, sgd(lr), rounds=3, methods=methods, k=2)
    torch.testing.assert_close(found, w, rtol=0, atol=1e-10)
