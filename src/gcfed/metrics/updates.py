"""The clients of a round and their updates: after local training, as received, and as aggregated.

w is the broadcast model, w_k is client k's trained model, and Δ_k = w_k − w. They have the
parameters that clients do not keep (as in FedPer, FedBN). Δ_k is measured before quantization and
projection unless a class says otherwise. Every mean leaves out clients whose Δ_k is not finite.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.aggregators.mean import MeanAggregator
from gcfed.federated.network.stack import ClientStack
from gcfed.federated.parts import (
    Download,
    Fact,
    Params,
    Received,
    Round,
    Setup,
    Upload,
    inner_products,
    per_client,
)
from gcfed.federated.parts.method import upload_shapes
from gcfed.methods.projection import by_output
from gcfed.metrics.base import ClientMetric, OwnNumbers, RoundTable, ServerMetric, dot, floats, now
from gcfed.utils.checked import Count, checked
from gcfed.utils.device import device_of

Row = dict[str, float]  # columns of a round → their values


class Cohorts(RoundTable):
    """Who took part: ``round,client`` in ``cohorts.csv``, clients ascending.

    Adds nothing to the rows of metrics.
    """

    name = "cohorts"
    header = ("client",)
    writes = ()

    def columns(self, round: Received) -> Row:
        self.append(round, ([client] for client in round.answered.tolist()))
        return {}


def weights_of(setup: Setup, names: Sequence[str]) -> dict[str, Callable[[Tensor], Tensor]]:
    """The weights among ``names`` that gradient centralization projects, each with its map from
    ``[K, *shape]`` to ``[K, out, in]``.
    """
    order = setup.forward_order
    params = dict(setup.module.net.named_parameters())
    weights: dict[str, Callable[[Tensor], Tensor]] = {}
    for name in names:
        if params[name].dim() < 2 or name in order.added:
            continue
        rows = partial(by_output, groups=order.groups.get(name, 0))
        inputs = rows(params[name].unsqueeze(0)).shape[2]
        if inputs > 1:
            weights[name] = rows
    return weights


class Updates(RoundTable, OwnNumbers):
    """Finds exploding clients: ``round,client,tensor,norm,removed`` in ``updates.csv``, per weight
    and client.

    ``norm`` is ‖Δ_k‖ of the tensor and ``removed`` is ‖(I − P)Δ_k‖, the part that gradient
    centralization removes; ``nan`` or ``inf`` if training was not finite. Adds nothing to the rows
    of metrics.
    """

    name = "updates"
    header = ("client", "tensor", "norm", "removed")
    writes = ()

    def bind(self, setup: Setup) -> None:
        super().bind(setup)
        self.weights = weights_of(setup, self.names)
        numbers = []
        for name in self.weights:
            numbers += [f"{name} norm", f"{name} removed"]
        self.numbers = tuple(numbers)

    def measure(self, stack: ClientStack, row: int, own: Params, download: Download) -> Tensor:
        squares = []
        for name, rows in self.weights.items():
            change = (own[name] - download.broadcast_model[name]).double()
            delta = rows(change.unsqueeze(0))[0]
            squares.append(delta.square().sum())
            squares.append(delta.mean(1).square().sum() * delta.shape[1])
        return torch.stack(squares).sqrt()

    def columns(self, round: Received) -> Row:
        lengths_of = self.values(round).unflatten(1, (-1, 2)).tolist()  # [K, weights, 2]
        for client, lengths in zip(round.answered.tolist(), lengths_of, strict=True):
            lines = []
            for name, (norm, removed) in zip(self.weights, lengths, strict=True):
                lines.append((client, name, f"{norm:.6g}", f"{removed:.6g}"))
            self.append(round, lines)
        return {}


class Drift(ClientMetric):
    """How far clients move from the global model and from each other in local training:
    ``drift/*``.

    With Δ̄ the plain mean of the Δ_k of the cohort:

    - ``drift/client_norm``: mean ‖Δ_k‖
    - ``drift/relative``: mean ‖Δ_k‖ / ‖w‖
    - ``drift/update_norm``: ‖Δ̄‖
    - ``drift/divergence``: (mean ‖Δ_k − Δ̄‖²)^½, from mean ‖Δ_k − Δ̄‖² = mean ‖Δ_k‖² − ‖Δ̄‖²
    - ``drift/cosine``: mean cosine of Δ_k and Δ̄, from mean ⟨Δ_k, Δ̄⟩ / ‖Δ_k‖ = ⟨mean Δ_k / ‖Δ_k‖, Δ̄⟩

    Each process sums its clients: two sums of the model's size, for any size of the cohort. One is
    in float64, so that a divergence of a millionth of ‖Δ̄‖ has three digits.
    """

    writes = (
        "drift/client_norm",
        "drift/relative",
        "drift/update_norm",
        "drift/divergence",
        "drift/cosine",
    )

    def zeros(self, round: Round) -> Params:
        return self._zeros(self.params(round.broadcast_model))

    def _zeros(self, start: Params) -> Params:
        """Sums in the memory format of the model."""
        sums = {}
        for name, t in start.items():
            sums[f"update {name}"] = torch.zeros_like(t, dtype=torch.float64)
            sums[f"direction {name}"] = torch.zeros_like(t)
        sums[""] = torch.zeros(3, dtype=torch.float64, device=device_of(start))
        return sums

    def note(self, stack: ClientStack, download: Download) -> Params:
        """Sums of Δ_k (float64) and Δ_k / ‖Δ_k‖ by parameter; under "" of ‖Δ_k‖, ‖Δ_k‖² and the
        number of clients.
        """
        start = self.params(download.broadcast_model)
        note = self._zeros(start)
        for row in range(len(stack)):
            own = {name: stack.full[name][row] for name in start}
            self._add_client(note, own, start)
        return note

    def _add_client(self, note: Params, own: Params, start: Params) -> None:
        """Adds a client's terms, tensor by tensor and twice: the memory may not hold a second copy
        of a model.
        """
        square = torch.zeros_like(note[""][0])
        for name, t in start.items():
            # in float64, because the divergence is a small difference of two large squares
            square += (own[name].double() - t).square().sum()
        finite = square.isfinite()
        square = square.where(finite, 0.0)
        norm = square.sqrt()
        unit = torch.where(norm > 0, 1 / norm, 0.0)
        note[""] += torch.stack([norm, square, finite.to(norm.dtype)])
        for name, t in start.items():
            delta = torch.where(finite, own[name].double() - t, 0.0)
            note[f"update {name}"] += delta
            note[f"direction {name}"] += delta.mul_(unit)

    def columns(self, round: Received) -> Row:
        sums = round.sums[self]
        norm, square, clients = sums[""]
        if not clients:
            return {}
        update = {name: sums[f"update {name}"] for name in self.names}
        direction = {name: sums[f"direction {name}"] for name in self.names}
        start = self.params(round.broadcast_model)
        client_norm = norm / clients
        update_norm = dot(update, update).sqrt() / clients
        variance = square / clients - update_norm**2
        values = {
            "drift/client_norm": client_norm,
            "drift/relative": client_norm / dot(start, start).sqrt(),
            "drift/update_norm": update_norm,
            "drift/divergence": variance.clamp(min=0).sqrt(),
            "drift/cosine": dot(direction, update) / clients**2 / update_norm,
        }
        return floats(values)


class Coherence(ClientMetric):
    """Whether clients agree in the part of Δ_k that gradient centralization removes:
    ``gc/rho/<tensor>``.

    P removes the mean over each output's inputs (also if the run's GC has another mean, of
    ``reproductions/mean_shapes.py``). For the m clients of a round,

        gc/rho/<tensor> = ‖mean_k (I − P)Δ_k‖² / mean_k ‖(I − P)Δ_k‖²

    is 1 if GC removes the same from all of them, a direction in which the model should go, and
    about 1/m if this part is noise of each client's data. If Local GC projects every step, only
    weight decay remains.
    """

    writes = ("gc/rho/*",)

    def bind(self, setup: Setup) -> None:
        super().bind(setup)
        self.weights = weights_of(setup, self.names)

    def zeros(self, round: Round) -> Params:
        sums = {"": round.zeros(len(self.weights) + 1)}
        for name, rows in self.weights.items():
            outputs = rows(round.broadcast_model[name].unsqueeze(0)).shape[1]
            sums[name] = round.zeros(outputs)
        return sums

    def note(self, stack: ClientStack, download: Download) -> Params:
        """For each weight the sum of the clients' means over inputs, ``[out]``; under ``""`` the
        sums of the squares of these means by weight, and the number of clients.
        """
        means = {}
        for name, rows in self.weights.items():
            delta = rows(stack.full[name] - download.broadcast_model[name])
            means[name] = delta.mean(2, dtype=torch.float64)  # [K, out]
        finite = torch.stack([mean.isfinite().all(1) for mean in means.values()]).all(0)
        squares = []
        sums = {}
        for name, mean in means.items():
            valid = mean.where(finite[:, None], 0.0)
            squares.append(valid.square().sum())
            sums[name] = valid.sum(0)
        return {"": torch.stack([*squares, finite.sum()])} | sums

    def columns(self, round: Received) -> Row:
        sums = round.sums[self]
        *squares, clients = sums[""]
        of_sums = torch.stack([sums[name].square().sum() for name in self.weights])
        rho = of_sums / clients / torch.stack(squares)
        pairs = zip(self.weights, rho.tolist(), strict=True)
        return {f"gc/rho/{name}": value for name, value in pairs if value == value}


class Angle(ServerMetric):
    """The angles that FedGC's constraints bound (gradient constraint, equations 1 and 8):
    ``angle/*``.

    Δ_k is client k's update as received (projected, quantized), Δ̄ is the aggregated update of this
    round, and s is the change of the broadcast model since the last round. Angles are in degrees,
    over all parameters together:

    - ``angle/server``: mean angle of Δ_k and s; none in the first round
    - ``angle/above_90``: share of clients with an angle above 90°; they undo a part of the last
      round
    - ``angle/update``: angle whose cosine is the clients' mean cosine to Δ̄,
      ⟨mean Δ_k / ‖Δ_k‖, Δ̄⟩ / ‖Δ̄‖

    Δ̄ is known after the uploads, so ``update`` averages cosines, not angles. Clients that did not
    move are left out.
    """

    writes = ("angle/server", "angle/above_90", "angle/update")

    def on_broadcast(self, download: Download, round: Round) -> None:
        super().on_broadcast(download, round)
        start = self.params(download.broadcast_model)
        last = self.server_state("broadcast", start, zeros=False)
        self._step = {name: t - last[name] for name, t in start.items()}
        self._step_norm = dot(self._step, self._step).sqrt()
        torch._foreach_copy_(list(last.values()), list(start.values()))

    def zeros(self, round: Round) -> Params:
        """For each parameter the sum of Δ_k / ‖Δ_k‖; under ``""`` the sum of angles, and the
        numbers of clients with an angle above 90°, with an angle, and with a direction.
        """
        sums = {"": round.zeros(4)}
        for name in self.names:
            sums[name] = torch.zeros_like(round.broadcast_model[name])
        return sums

    def take(self, upload: Upload, round: Round) -> Params:
        delta = self.as_sent(upload, self.names)
        deltas = list(delta.values())
        steps = [self._step[name] for name in delta]
        norm_K = inner_products(deltas, deltas, torch.float64).sqrt()
        moved = upload.finite & norm_K.isfinite() & (norm_K > 0)
        cosine_K = inner_products(deltas, steps, torch.float64) / (norm_K * self._step_norm)
        valid = moved & cosine_K.isfinite()
        angle_K = torch.where(valid, degrees(cosine_K), 0.0)
        above = valid & (cosine_K < 0)
        terms = {"": torch.stack([angle_K.sum(), above.sum(), valid.sum(), moved.sum()])}
        for name, t in delta.items():
            unit = t / per_client(norm_K, t).to(t.dtype)
            terms[name] = torch.where(per_client(moved, unit), unit, 0.0).sum(0)
        return terms

    def columns(self, round: Received) -> Row:
        if not round.usable:
            return {}
        sums = round.sums[self]
        update = self.params(round.update)
        total, above, count, clients = sums[""]
        cosine = dot(self.params(sums), update) / (clients * dot(update, update).sqrt())
        values = {
            "angle/server": total / count,
            "angle/above_90": above / count,
            "angle/update": degrees(cosine),
        }
        return {name: value for name, value in floats(values).items() if value == value}


def degrees(cosine: Tensor) -> Tensor:
    """The angle of a cosine, 0 to 180; clamps the cosine, which rounding may move
    out of its range.
    """
    return cosine.clamp(-1, 1).arccos().rad2deg()


@checked
@dataclass(eq=False)
class Gap(ServerMetric):
    """The gap between the partial update and the true one: ``gap/*``, GC-Fed's Figure 1(b), in
    three units.

    With the cohort S the server computes the mean Δ_S; with all N clients it would compute Δ_all.
    In measured rounds the clients outside the cohort train too, in a *rehearsal* that changes no
    state:

    ================  =====================================
    ``gap/l2``        ‖Δ_S − Δ_all‖
    ``gap/relative``  ‖Δ_S − Δ_all‖ / ‖Δ_all‖
    ``gap/cosine``    ⟨Δ_S, Δ_all⟩ / (‖Δ_S‖ ‖Δ_all‖)
    ================  =====================================

    Both are means of the uploads over parameters, with the aggregator's weights, before the
    server's own steps (Global GC, momentum, a table). Attacks that see a whole cohort (ALIE, IPM)
    do not act in a rehearsal. A measured round costs N/|S| rounds of training, which count in
    ``time/round_s`` but not in ``time/train_s``.
    """

    every: Count = 10
    facts = {Fact.REHEARSES}
    writes = ("gap/l2", "gap/relative", "gap/cosine")

    def bind(self, setup: Setup) -> None:
        super().bind(setup)
        weighting: Any = getattr(setup.aggregator, "weighting", "uniform")
        self.aggregator = MeanAggregator(weighting)

    def begin(self, download: Download, round: Round) -> None:
        self.partial = self.aggregator.new_sum(round)  # of the cohort
        clients = np.arange(round.num_clients)
        everybody = replace(round, cohort=clients, versions=np.full_like(clients, round.index))
        self.full = self.aggregator.new_sum(everybody)
        device = self.module.device
        others = np.setdiff1d(clients, round.cohort)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for upload in self.transport.rehearse(download, others):
                self.full.add(replace(upload, delta=self.params(upload.delta)))
                del upload  # nothing holds it while the next stack trains
        now(device)  # waits for the device
        # or the wait for a slower process would count as training
        self.module.trainer.strategy.barrier()

    def take(self, upload: Upload, round: Round) -> None:
        for mean in (self.full, self.partial):
            mean.add(replace(upload, delta=self.params(upload.delta)))

    def columns(self, round: Received) -> Row:
        like = self.params(upload_shapes(self.server_parts, round)["delta"])
        partial = self.partial.reduce(like)
        full = self.full.reduce(like)
        if not round.num_finite:
            return {}
        error = {name: t - full[name] for name, t in partial.items()}
        gap = dot(error, error).sqrt()
        full_norm = dot(full, full).sqrt()
        cosine = dot(partial, full) / (full_norm * dot(partial, partial).sqrt())
        return floats({"gap/l2": gap, "gap/relative": gap / full_norm, "gap/cosine": cosine})
