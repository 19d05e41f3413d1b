"""The clients of a round and their updates: after local training, as received, and as aggregated.

w is the broadcast model, w_k client k's trained model, and Δ_k = w_k − w, of the parameters that
clients do not keep (as in FedPer, FedBN), before quantization and projection unless a class says
otherwise. Every mean leaves out clients whose Δ_k is not finite.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.aggregators.mean import MeanAggregator
from gcfed.federated.network.rows import per_client
from gcfed.federated.network.stack import ClientStack
from gcfed.federated.parts import Download, Params, Received, Round, Setup, Upload, upload_shapes
from gcfed.methods.projection import by_output
from gcfed.metrics.base import ClientMetric, OwnNumbers, RoundTable, ServerMetric, dot, floats, now
from gcfed.utils.checked import Count, checked


class Cohorts(RoundTable):
    """Who took part: ``round,client`` in ``cohorts.csv``, clients ascending.

    Adds nothing to the rows of metrics.
    """

    name = "cohorts"
    header = ("client",)

    def columns(self, round: Received) -> dict[str, float]:
        self.append(round, ([client] for client in round.cohort.tolist()))
        return {}


def weights_of(setup: Setup, names: Sequence[str]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Those of ``names`` that gradient centralization projects → the map from ``[K, *shape]`` to
    ``[K, out, in]``.
    """
    order = setup.forward_order
    params = dict(setup.module.net.named_parameters())
    names = [name for name in names if params[name].dim() > 1 and name not in order.added]
    rows = {name: partial(by_output, groups=order.groups.get(name, 0)) for name in names}
    return {name: own for name, own in rows.items() if own(params[name].unsqueeze(0)).shape[2] > 1}


class Updates(RoundTable, OwnNumbers):
    """Finds exploding clients: ``round,client,tensor,norm,removed`` in ``updates.csv``, per weight
    and client.

    ``norm`` is ‖Δ_k‖ of the tensor and ``removed`` is ‖(I − P)Δ_k‖, the part that gradient
    centralization removes; ``nan`` or ``inf`` if training was not finite. Adds nothing to the rows
    of metrics.
    """

    name = "updates"
    header = ("client", "tensor", "norm", "removed")

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        self.weights = weights_of(setup, self.names)
        self.numbers = tuple(
            f"{name} {what}" for name in self.weights for what in ("norm", "removed")
        )

    def measure(self, stack: ClientStack, row: int, own: Params, download: Download) -> Tensor:
        squares = []
        for name, rows in self.weights.items():
            delta = rows((own[name] - download.model[name]).double().unsqueeze(0))[0]
            squares += [delta.square().sum(), delta.mean(1).square().sum() * delta.shape[1]]
        return torch.stack(squares).sqrt()

    def columns(self, round: Received) -> dict[str, float]:
        lengths = self.values(round).unflatten(1, (-1, 2)).tolist()
        for client, tensors in zip(round.cohort.tolist(), lengths, strict=True):
            pairs = zip(self.weights, tensors, strict=True)
            self.append(
                round,
                (
                    (client, name, f"{norm:.6g}", f"{removed:.6g}")
                    for name, (norm, removed) in pairs
                ),
            )
        return {}


class Drift(ClientMetric):
    """How far clients move from the global model and from each other in local training:
    ``drift/*``.

    With Δ̄ the plain mean of the Δ_k of the cohort:

    ======================
    ==============================================================================
    ``drift/client_norm``   mean ‖Δ_k‖ ``drift/relative``      mean ‖Δ_k‖ / ‖w‖
    ``drift/update_norm``   ‖Δ̄‖ ``drift/divergence``    (mean ‖Δ_k − Δ̄‖²)^½, from mean ‖Δ_k − Δ̄‖²
    = mean ‖Δ_k‖² − ‖Δ̄‖² ``drift/cosine``        mean cosine of Δ_k and Δ̄, from mean ⟨Δ_k, Δ̄⟩ /
    ‖Δ_k‖ = ⟨mean Δ_k / ‖Δ_k‖, Δ̄⟩ ======================
    ==============================================================================

    Each process sums its clients: two sums of the model's size, for any size of the cohort.
    """

    def zeros(self, round: Round) -> Params:
        start = self.params(round.start)
        sums = {
            f"{what} {n}": torch.zeros_like(t)
            for what in ("update", "direction")
            for n, t in start.items()
        }
        return {"": round.zeros(3)} | sums

    def note(self, stack: ClientStack, download: Download) -> Params:
        """Sums of Δ_k and Δ_k / ‖Δ_k‖ by parameter; under "" of ‖Δ_k‖, ‖Δ_k‖² and the number of
        clients.
        """
        start = self.params(download.model)
        # Tensor by tensor, and twice: the memory may not hold a second copy of a whole stack.
        deltas = (
            (stack.full[name] - t).reshape(len(stack), t.numel()) for name, t in start.items()
        )
        square_K = torch.stack(
            [delta.square().sum(1, dtype=torch.float64) for delta in deltas]
        ).sum(0)
        finite = square_K.isfinite()
        square_K = square_K.where(finite, 0.0)
        norm_K = square_K.sqrt()
        unit_K = torch.where(norm_K > 0, 1 / norm_K, 0.0)
        note = {"": torch.stack([norm_K.sum(), square_K.sum(), finite.sum()])}
        for name, t in start.items():
            delta = torch.where(per_client(finite, stack.full[name]), stack.full[name] - t, 0.0)
            # in the memory format of the model
            note[f"update {name}"] = torch.empty_like(t).copy_(delta.sum(0))
            note[f"direction {name}"] = torch.empty_like(t).copy_(
                delta.mul_(per_client(unit_K, delta)).sum(0)
            )
        return note

    def columns(self, round: Received) -> dict[str, float]:
        sums = round.sums[self]
        update, direction = (
            {n: sums[f"{what} {n}"] for n in self.names} for what in ("update", "direction")
        )
        norm, square, clients = sums[""]
        start = self.params(round.start)
        update_norm = dot(update, update).sqrt() / clients
        values = {
            "drift/client_norm": norm / clients,
            "drift/relative": norm / clients / dot(start, start).sqrt(),
            "drift/update_norm": update_norm,
            "drift/divergence": (square / clients - update_norm**2).clamp(min=0).sqrt(),
            "drift/cosine": dot(direction, update) / clients**2 / update_norm,
        }
        return floats(values) if clients else {}


class Coherence(ClientMetric):
    """Whether clients agree in the part of Δ_k that gradient centralization removes:
    ``gc/rho/<tensor>``.

    P removes the mean over each output's inputs (also if the run's GC has
    another mean, of ``reproductions/mean_shapes.py``). For the m clients of a round,

        gc/rho/<tensor> = ‖mean_k (I − P)Δ_k‖² / mean_k ‖(I − P)Δ_k‖²

    is 1 if GC removes the same from all of them, a direction in which the model should go, and
    about 1/m if this part is noise of each client's data. If Local GC projects every step, only
    weight decay remains.
    """

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        self.weights = weights_of(setup, self.names)

    def zeros(self, round: Round) -> Params:
        outputs = {
            name: rows(round.start[name].unsqueeze(0)).shape[1]
            for name, rows in self.weights.items()
        }
        return {"": round.zeros(len(outputs) + 1)} | {
            name: round.zeros(out) for name, out in outputs.items()
        }

    def note(self, stack: ClientStack, download: Download) -> Params:
        """Sums of the means by weight; under "" of their squares, and the number of clients."""
        deltas = {
            name: rows(stack.full[name] - download.model[name])
            for name, rows in self.weights.items()
        }
        means = {name: delta.mean(2, dtype=torch.float64) for name, delta in deltas.items()}
        finite = torch.stack([mean_KO.isfinite().all(1) for mean_KO in means.values()]).all(0)
        means = {name: mean_KO.where(finite[:, None], 0.0) for name, mean_KO in means.items()}
        squares = torch.stack(
            [*(mean_KO.square().sum() for mean_KO in means.values()), finite.sum()]
        )
        return {"": squares} | {name: mean_KO.sum(0) for name, mean_KO in means.items()}

    def columns(self, round: Received) -> dict[str, float]:
        sums = round.sums[self]
        *squares, clients = sums[""]
        rho = (
            torch.stack([sums[name].square().sum() for name in self.weights])
            / clients
            / torch.stack(squares)
        )
        return {
            f"gc/rho/{name}": r
            for name, r in zip(self.weights, rho.tolist(), strict=True)
            if r == r
        }


class Angle(ServerMetric):
    """The angles that FedGC's constraints bound (gradient constraint, equations 1 and 8):
    ``angle/*``.

    Δ_k is client k's update as received (projected, quantized), Δ̄ the aggregated update of this
    round, and s the change of the broadcast model since the last round. Angles are in degrees, over
    all parameters together:

    ==================
    ========================================================================================
    ``angle/server``    mean angle of Δ_k and s; none in the first round ``angle/above_90``  share
    of clients with an angle above 90°: they undo a part of the last round ``angle/update``    angle
    whose cosine is the clients' mean cosine to Δ̄, ⟨mean Δ_k / ‖Δ_k‖, Δ̄⟩ / ‖Δ̄‖ ==================
    ========================================================================================

    Δ̄ is known after the uploads, so ``update`` averages cosines, not angles. Clients that did not
    move are left out.
    """

    def on_broadcast(self, download: Download, round: Round) -> None:
        super().on_broadcast(download, round)
        start = self.params(download.model)
        last = self.server_state("broadcast", start, zeros=False)
        self._step = {name: t - last[name] for name, t in start.items()}
        self._step_norm = dot(self._step, self._step).sqrt()
        torch._foreach_copy_(list(last.values()), list(start.values()))

    def zeros(self, round: Round) -> Params:
        """Sums of Δ_k / ‖Δ_k‖; under "" of angles, clients above 90°, with an angle, and with a
        direction.
        """
        return {"": round.zeros(4)} | {
            name: torch.zeros_like(round.start[name]) for name in self.names
        }

    def take(self, upload: Upload, round: Round) -> Params:
        delta = self.as_sent(upload, self.names)
        norm_K = _dots(delta, delta).sqrt()
        moved = upload.finite & norm_K.isfinite() & (norm_K > 0)
        cosine_K = _dots(delta, self._step) / (norm_K * self._step_norm)
        valid = moved & cosine_K.isfinite()
        angle_K = torch.where(valid, degrees(cosine_K), 0.0)
        terms = {
            "": torch.stack(
                [angle_K.sum(), (valid & (cosine_K < 0)).sum(), valid.sum(), moved.sum()]
            )
        }
        for name, t in delta.items():
            unit = t / per_client(norm_K, t).to(t.dtype)
            terms[name] = torch.where(per_client(moved, unit), unit, 0.0).sum(0)
        return terms

    def columns(self, round: Received) -> dict[str, float]:
        if not round.usable:
            return {}
        sums = round.sums[self]
        update = self.params(round.update)
        total, above, count, clients = sums[""]
        cosine = dot(self.params(sums), update) / (clients * dot(update, update).sqrt())
        known = floats(
            {"server": total / count, "above_90": above / count, "update": degrees(cosine)}
        )
        return {f"angle/{name}": value for name, value in known.items() if value == value}


def degrees(cosine: Tensor) -> Tensor:
    """The angle of a cosine, 0 to 180; clamps the cosine, which rounding may move
    out of its range.
    """
    return cosine.clamp(-1, 1).arccos().rad2deg()


def _dots(tensors_K: Params, other: Params) -> Tensor:
    """⟨a_k, b_k⟩ over all tensors, ``[K, *shape]`` both, or one b for all, ``[*shape]`` → ``[K]``,
    in float64.
    """
    products = ((t * other[name]).reshape(len(t), -1) for name, t in tensors_K.items())
    return torch.stack([product.sum(1, dtype=torch.float64) for product in products]).sum(0)


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
    facts = {"rehearses"}

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        weighting: Any = getattr(setup.aggregator, "weighting", "uniform")
        self.partial = MeanAggregator(weighting)
        self.full = MeanAggregator(weighting)

    def begin(self, download: Download, round: Round) -> None:
        device = self.module.device
        others = np.setdiff1d(np.arange(round.num_clients), round.cohort)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for upload in self.transport.rehearse(download, others):
                self.full.add(replace(upload, delta=self.params(upload.delta)), round)
                del upload  # nothing holds it while the next stack trains
        now(device)  # waits for the device
        # or the wait for a slower process would count as training
        self.module.trainer.strategy.barrier()

    def take(self, upload: Upload, round: Round) -> None:
        for mean in (self.full, self.partial):
            mean.add(replace(upload, delta=self.params(upload.delta)), round)

    def columns(self, round: Received) -> dict[str, float]:
        like = self.params(upload_shapes(self.server_parts, round)["delta"])
        partial = self.partial.reduce(round, like)
        full = self.full.reduce(round, like)
        if not round.num_finite:
            return {}
        error = {name: t - full[name] for name, t in partial.items()}
        gap, true, part = torch.stack(
            [dot(error, error), dot(full, full), dot(partial, partial)]
        ).sqrt()
        cosine = dot(partial, full) / (true * part)
        return floats({"gap/l2": gap, "gap/relative": gap / true, "gap/cosine": cosine})
