"""Gradient constraints for clients and server: FedGC (anonymous, "… under Gradient Constraint",
Algorithm 1).

Not related to GC-Fed. Its gradients are descent directions. B mini-batches of SGD (PGD,
``client.steps=B``) make client k's pseudo-gradient g̃_k = (w_k − w)/η, eq. 4; ḡ is the aggregator's
mean, and g' the server's gradient of the last round. The paper weights ḡ by samples: by all data of
a client, or, as its Section 3 may mean, by the B mini-batches (``aggregator.weighting=uniform``).

    CGC, tensor by tensor    g_k = argmin_u ½‖u − g̃_k‖²   s.t.  ⟨u, g'⟩ ≥ C             eq. 5
    SGC, all as one vector   g = argmin_z ½‖z − ḡ‖²       s.t.  ⟨z, g_k⟩ ≥ C, k ∈ S     eq. 8

If no z meets eq. 8's constraints, g = ḡ. Both are solved through their duals (A.1, A.2). The code
stays in units of Δ = ηg, where C is η²C (for CGC ηη'C, with the η' of g'). η'g' is the change of
the model between two broadcasts, including the server's optimizer and Global GC. A tensor that did
not change (in the first round: all) gives no constraint.

As printed, CGC has no bound: u = g̃_k + v g', v = (C − ⟨g̃_k, g'⟩)/‖g'‖², has a norm of at least
C/‖g'‖, however small g' is; and the update of a single scalar never changes its sign. Networks with
scalars, such as the paper's ResNet-9 with Fixup, may diverge. ``layerwise`` delays this, but does
not always prevent it (reproductions/results/fedgc.md).

Memory: SGC holds the whole cohort's updates, each on the process that trained the client.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import quadprog
import torch
from torch import Tensor, nn

from gcfed.federated.parallel.sums import LIMIT, Sums
from gcfed.federated.parts import (
    ClientPart,
    ClientStates,
    Download,
    Fact,
    Method,
    Params,
    Received,
    Round,
    ServerPart,
    Setup,
    Upload,
    inner_products,
    per_client,
)
from gcfed.federated.protocol.checks import finite_clients
from gcfed.methods.requirements import local_sgd, mean_aggregator
from gcfed.utils.checked import Weight, checked
from gcfed.utils.device import on_device

RIDGE = 1e-10  # added to a unit diagonal: GGᵀ is singular where gradients depend on each other
COLUMNS = 2**20  # of G at a time: in float64, and in one message to the other processes


@checked
class FedGC(Method):
    """Projects the clients' updates (CGC) and their mean (SGC) and adds to the row of metrics:

    - ``fedgc/cgc_layers``: the share of the uploaded tensors (layers, updates) that CGC projected;
    - ``fedgc/sgc_active``: the clients of the cohort whose constraint bound the mean (λ_k > 0);
    - ``fedgc/sgc_failed``: 1 if SGC's problem had no solution and the server applied the mean.

    Args:
        margin: C.
        layerwise: the unit that CGC projects: a ``tensor``; a ``layer`` (weight and bias; a Fixup
            block with its scalars); or the ``model``, as in eq. 5 (the paper avoids it to save
            memory).
        cgc, sgc: whether clients and server project; without both this is FedAvg.
    """

    def __init__(
        self,
        margin: Weight = 1e-3,
        *,
        layerwise: Literal["tensor", "layer", "model"] = "tensor",
        cgc: bool = True,
        sgc: bool = True,
    ) -> None:
        client = ClientConstraint(margin, layerwise, cgc)
        super().__init__(client, ServerConstraint(margin, cgc, sgc))


class ClientConstraint(ClientPart):
    """CGC, along g' as the server sent it.

    A layer that hardly moved, such as a bias before batch normalisation, needs a large update to
    reach the margin.
    """

    facts = {Fact.CORRECTS_DRIFT, Fact.EDITS_MEAN, Fact.LONG_UPDATES, Fact.ONE_RATE}
    needs = [local_sgd("it computes a pseudo-gradient from w_k − w", momentum=True)]

    def __init__(self, margin: float, layerwise: str, cgc: bool) -> None:
        self.margin = margin
        self.layerwise = layerwise
        self.cgc = cgc

    def bind(self, setup: Setup) -> None:
        self.lr = setup.solver.lr
        units: dict[str, list[str]] = {}
        for name in self.trained_names:
            unit = name
            if self.layerwise == "layer":
                unit = layer_of(setup.module.net, name)
            elif self.layerwise == "model":
                unit = ""
            units.setdefault(unit, []).append(name)
        self.units = list(units.values())

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        if not self.cgc:
            return
        moves = download.extra["fedgc"]
        margin = self.margin * download.lr * self.lr(download.round_index - 1)
        multipliers = []
        for unit in self.units:
            pairs = [(upload.delta[name], moves[name]) for name in unit]
            multipliers.append(constrain_(pairs, margin))
        v_UK = torch.stack(multipliers)
        counts = torch.stack([(v_UK > 0).sum(), v_UK.isfinite().sum()])
        upload.notes["fedgc"] = {"projected": counts}


class ServerConstraint(ServerPart):
    def __init__(self, margin: float, cgc: bool, sgc: bool) -> None:
        self.margin = margin
        self.cgc = cgc
        self.sgc = sgc

    @property
    def writes(self) -> Sequence[str]:  # type: ignore[override]
        columns = []
        if self.cgc:
            columns.append("fedgc/cgc_layers")
        if self.sgc:
            columns += ["fedgc/sgc_active", "fedgc/sgc_failed"]
        return columns

    def validate(self, setup: Setup) -> None:
        if self.sgc:
            need = mean_aggregator("every client's update is one of its constraints")
            need(setup, f"{self.title} with methods.fedgc.sgc=true")

    def bind(self, setup: Setup) -> None:
        self.may_miss = setup.transport.remote

    def on_broadcast(self, download: Download, round: Round) -> None:
        self._uploads: list[Upload] = []
        self._active = 0
        self._failed = 0
        if not self.cgc:
            return
        start = self.trained(download.broadcast_model)
        first = "previous" not in self._states
        previous = self.server_state("previous", start, zeros=False)
        # η'g'
        download.extra["fedgc"] = {name: now - previous[name] for name, now in start.items()}
        if first or (len(round.cohort) == round.num_clients and not self.may_miss):
            # zeros, or the difference of two broadcasts that all clients received
            download.sent_bytes["fedgc"] = 0
        torch._foreach_copy_(list(previous.values()), list(start.values()))

    def notes(self, round: Round) -> dict[str, Params]:
        if not self.cgc:
            return {}
        return {"fedgc": {"projected": torch.zeros(2, dtype=torch.int64)}}

    def sums(self, round: Round) -> Params:
        if not self.cgc:
            return {}
        return {"projected": round.zeros(2)}  # tensors that CGC projected, and all

    def on_receive(self, upload: Upload, round: Round) -> Params | None:
        if self.sgc:
            for name in self.trained_names:  # in place: a copy would double the memory of the round
                delta = upload.delta[name]
                delta.masked_fill_(per_client(~upload.finite, delta), 0.0)
            self._uploads.append(upload)
        if not self.cgc:
            return None
        note = upload.notes["fedgc"]
        if self.may_miss:  # a site may send any numbers
            most = len(upload.clients) * len(self.trained_names)
            return {"projected": note["projected"].clamp(0, most)}
        return note

    def on_aggregate_end(self, update: Params, round: Received) -> None:
        if not self.sgc:
            return
        mean = self.trained(update)
        table = products(self._uploads, mean, round).cpu().numpy()  # SGC's one synchronisation
        gram = table[:, :-2]
        inner = table[:, -2]
        is_finite = table[:, -1] > 0
        gram = gram[np.ix_(is_finite, is_finite)]
        solution = multipliers(gram, inner[is_finite], self.margin * round.lr**2)
        weights = np.zeros(len(is_finite))
        if solution is not None:
            weights[is_finite] = solution
        self._active = int((weights > 0).sum())
        self._failed = int(solution is None)
        # Also for zeros, so that no process waits for another whose multipliers are zero by
        # rounding.
        add_weighted_(mean, self._uploads, torch.from_numpy(weights), round)
        self._uploads = []

    def on_round_end(self, row: dict[str, Any], round: Received) -> None:
        if self.cgc:
            projected, uploaded = round.sums[self]["projected"].tolist()
            row["fedgc/cgc_layers"] = projected / max(uploaded, 1)
        if self.sgc:
            row |= {"fedgc/sgc_active": self._active, "fedgc/sgc_failed": self._failed}


def layer_of(net: nn.Module, name: str) -> str:
    """The layer of a parameter: the outermost module around it, except the network, with own
    parameters.
    """
    *modules, _ = name.split(".")
    for depth in range(1, len(modules)):
        around = ".".join(modules[:depth])
        if list(net.get_submodule(around).parameters(recurse=False)):
            return around
    return ".".join(modules)


def constrain_(pairs: Sequence[tuple[Tensor, Tensor]], margin: float) -> Tensor:
    """CGC: replaces each client's Δ_k in place by the nearest with ⟨Δ_k, move⟩ ≥ margin.

    Args:
        pairs: tensors of Δ_k, ``[K, *shape]``, and of the move, ``[*shape]``, that count as one
            vector.

    Returns v ≥ 0 of ``Δ_k + v · move``, the multiplier of eq. 7, ``[K]``. With v = 0, as for a
    ``move`` of zeros, Δ_k does not change, bit for bit.
    """
    deltas = [delta for delta, _ in pairs]
    moves = [move for _, move in pairs]
    inner_K = inner_products(deltas, moves, torch.float64)
    square = torch.stack([move.square().sum(dtype=torch.float64) for move in moves]).sum()
    v_K = torch.where(square > 0, (margin - inner_K).clamp(min=0) / square, 0.0)
    for delta, move in pairs:
        delta.addcmul_(per_client(v_K.to(delta.dtype), delta), move)
    return v_K


def multipliers(gram: np.ndarray, inner: np.ndarray, margin: float) -> np.ndarray | None:
    """SGC: λ ≥ 0, ``[K]``, of ``z = ḡ + Gᵀλ``, the nearest to ḡ with ``Gz ≥ margin``; None if no
    such z exists.

    Solves the dual, eq. 10, for λ_k ‖g_k‖, so that short and long gradients have the same numerical
    accuracy. ``gram`` is GGᵀ, ``[K, K]``, and ``inner`` Gḡ, ``[K]``.
    """
    if (inner >= margin).all():
        return np.zeros(len(inner))
    squares = gram.diagonal()
    norms = np.sqrt(np.where(squares > 0, squares, 1.0))
    cosines = gram / np.outer(norms, norms)
    lacking = (margin - inner) / norms
    identity = np.eye(len(inner))
    try:
        scaled, *_, zeros = quadprog.solve_qp(
            cosines + RIDGE * identity, lacking, identity, np.zeros(len(inner))
        )
    except ValueError:
        return None
    scaled[zeros - 1] = 0.0  # where λ_k ≥ 0 binds; quadprog counts from 1
    # If no z exists, some α ≥ 0 with Σ α_k = 1 has Gᵀα = 0, so Σ α_k (margin − ⟨z, g_k⟩) = margin
    # for every z: one client lacks the whole margin. With the ridge, a solution lacks only a small
    # part of it.
    missing = lacking - cosines @ scaled
    allowed = margin / norms / 2 + 1e-9 * np.abs(lacking).max()
    if not (missing <= allowed).all():  # also if a number is NaN
        return None
    return scaled / norms


def products(uploads: Sequence[Upload], update: Params, round: Received) -> Tensor:
    """``[|S|, |S| + 2]`` in float64, equal on every process: ⟨Δ_k, Δ_j⟩, then ⟨Δ_k, Δ⟩, then 1 if
    client k is finite.

    ``uploads`` are those of this process, with zeros for clients that are not finite; ``update`` is
    Δ.
    """
    size = len(round.cohort)
    like = next(iter(update.values()))
    rows = [on_device(round.rows(upload.clients), like.device) for upload in uploads]
    table = torch.zeros(size, size + 2, dtype=torch.float64, device=like.device)
    for rows_K, upload in zip(rows, uploads, strict=True):
        table[rows_K, -1] = upload.finite.double()
    (table,) = round.reduce([table])
    for name, mean in update.items():
        deltas = []
        for upload in uploads:
            delta_K = upload.delta[name].reshape(len(upload.clients), -1)
            deltas.append(delta_K.split(COLUMNS, dim=1))
        for i, columns in enumerate(mean.reshape(-1).split(COLUMNS)):
            block = mean.new_zeros(size, len(columns))
            for rows_K, blocks in zip(rows, deltas, strict=True):
                block[rows_K] = blocks[i]
            (block,) = round.reduce([block])
            with_mean = torch.cat([block, columns.unsqueeze(0)]).double()
            table[:, :-1] += with_mean[:-1] @ with_mean.T
    return table


def add_weighted_(
    update: Params, uploads: Sequence[Upload], weights: Tensor, round: Received
) -> None:
    """``Δ ← Δ + Σ_k weight_k Δ_k`` in place, over the clients of all processes; ``weights`` is
    ``[|S|]``.
    """
    sums = Sums(update)
    for upload in uploads:
        weights_K = on_device(weights[round.rows(upload.clients)], upload.finite.device)
        terms_K = {}
        for name in update:
            delta = upload.delta[name]
            terms_K[name] = delta * per_client(weights_K.to(delta.dtype), delta)
        sums.add(terms_K, finite_clients(terms_K, LIMIT).double())
    total, terms = sums.total()
    # Otherwise a term is too large for the sum, and the step is refused.
    is_complete = terms == len(round.answered)
    for name, mean in update.items():
        mean.add_(torch.where(is_complete, total[name], torch.nan).to(mean.dtype))
