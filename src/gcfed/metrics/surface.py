"""The loss around three clients of a round, as in FedACG's Figure 2(a): ``surface_round_<t>.npz``.

==============================  =======================================================================================
``x``, ``y`` ``[G]``            the grid's axes
``loss``, ``acc`` ``[G, G]``    at y (row) and x (column); ``acc`` only where there are classes
``names`` ``[6]``               ``client <id>`` three times, ``mean`` (of the three), ``broadcast``, ``global``
``points`` ``[6, 2]``           where they lie, x and y
``point_loss``, ``point_acc``   ``[6]``, of the models themselves
``distance`` ``[6]``            from the plane
``round``, ``split``            rounds finished; where the samples are from
==============================  =======================================================================================
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Upload, finite_clients
from gcfed.federated.method import Setup
from gcfed.federated.processes.strategy import rank_and_world
from gcfed.federated.received import Received, Round
from gcfed.federated.stack import ClientStack
from gcfed.metrics.base import AT_ONCE, ClientMetric, drawn, evaluating, fetch_tests
from gcfed.utils.checked import Count, Weight, checked
from gcfed.utils.files import replacing
from gcfed.utils.rng import generator

log = logging.getLogger(__name__)
THREE = 3


@checked
@dataclass(eq=False)
class Surface(ClientMetric):
    """Evaluates the network on the plane through three clients' models, at the nodes of a square grid.

    w₁, w₂ and w₃ are the local models of the first three clients of the cohort, by id, whose training stayed finite.
    The origin is w₁, the first axis lies along w₂ − w₁ and the second, in the same unit (Euclidean distance over all
    parameters), across it towards w₃. The broadcast model and the new global one lie off the plane and are marked at
    their projections. Floating-point buffers follow the same combinations; a running variance below 0 becomes 0. All
    models are evaluated in the precision of their weights.

    A measured round costs grid² + 6 passes over the samples, divided among the processes. It adds nothing to the rows.

    Raises:
        ValueError: at ``validate``, a cohort of fewer than three.
    """

    folder: str
    every: Count = 100
    grid: Annotated[int, Field(ge=2, le=1000)] = 21
    margin: Weight = 0.25
    samples: Count | None = 500
    split: Literal["test", "train"] = "train"
    figures: bool = True

    name = "surface"

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        if setup.cohort < THREE:
            raise ValueError(
                f"metrics=surface lays a plane through three clients' models, and "
                f"participation.per_round={setup.cohort}: take 3 or more, or leave surface out of metrics."
            )

    def note(self, stack: ClientStack, download: Download) -> dict[str, Any]:
        """The first three finite local models of a stack, on the CPU: name → ``[3, *shape]``, and their ``clients``,
        ``[3]``: −1 where there are fewer.
        """
        finite = finite_clients(stack.full).tolist()
        rows = [row for row in np.argsort(stack.clients).tolist() if finite[row]][:THREE]
        models = {name: torch.zeros(THREE, *t.shape[1:], dtype=t.dtype) for name, t in stack.full.items()}
        for name, t in models.items():
            t[: len(rows)] = stack.full[name][rows].cpu()
        clients = [*stack.clients[rows].tolist(), *[-1] * THREE]
        return {"models": models, "clients": torch.tensor(clients[:THREE])}

    def notes(self, round: Round) -> dict[str, Any]:
        if not self.due_in(round):
            return {}
        models = {name: torch.empty(THREE, *t.shape, dtype=t.dtype, device="meta") for name, t in round.start.items()}
        return {self.title: {"models": models, "clients": torch.empty(THREE, dtype=torch.int64)}}

    def begin(self, download: Download, round: Round) -> None:
        self._held: dict[int, Params] = {}  # client → its model: the first three that were seen here

    def zeros(self, round: Round) -> Params:
        return {"held": round.zeros(len(round.cohort))}  # 1 where a process has held this client's model

    def take(self, upload: Upload, round: Round) -> Params:
        note: Any = upload.notes[self.title]
        held = round.zeros(len(round.cohort))
        for row, client in enumerate(note["clients"].tolist()):
            if client in upload.clients:
                self._held[client] = {name: t[row].clone() for name, t in note["models"].items()}
                held[round.places(np.array([client]))] = 1.0
        self._held = dict(sorted(self._held.items())[:THREE])
        return {"held": held}

    def columns(self, round: Received) -> dict[str, float]:
        found = self._measure(round)
        if rank_and_world()[0] != 0:
            return {}
        if not found:
            log.warning("round %d: no three finite local models that span a plane; no loss surface", round.index + 1)
            return {}
        path = Path(self.folder) / f"surface_round_{round.index + 1}.npz"
        with replacing(path) as temporary:
            np.savez(temporary, **found)  # type: ignore[arg-type]
        if self.figures:
            from gcfed.plots.pictures import plot_surface  # matplotlib: only in the rounds that draw

            plot_surface(found, picture := path.with_suffix(".png"))
            self.show(picture, round)
        return {}

    def _measure(self, round: Received) -> dict[str, np.ndarray]:
        """What the file holds; {} where there is no plane. Every process takes its part in it and has all of it."""
        models, beside = self._three(round), [round.start, self.module.broadcast_state()]
        if not models:
            return {}
        rank, world = rank_and_world()
        columns = ("loss", "acc") if self.module.task.has_classes else ("loss",)
        samples = self._samples(round.seed, self.module.device)
        scores = round.zeros(6 + self.grid**2, len(columns))
        with evaluating(self.module.net):
            for i, known in zip((0, 1, 2, 4, 5), [*models.values(), *beside], strict=True):
                if i % world == rank:
                    scores[i] = self._score(known, samples)
            plane = Plane(list(models.values()), self.names)
            if plane.is_flat:
                return {}
            points = np.array([*plane.corners, plane.corners.mean(0), *map(plane.project, beside)])
            x, y = square(points[:, :2], self.grid, self.margin)
            nodes = dict(enumerate(((a, b) for b in y for a in x), start=6)) | {3: points[3, :2]}  # 3: their mean
            for i, (a, b) in nodes.items():
                if i % world == rank:
                    scores[i] = self._score(plane.at(float(a), float(b)), samples)
        (scores,) = round.reduce([scores])
        names = [*(f"client {client}" for client in models), "mean", "broadcast", "global"]
        found = {"round": round.index + 1, "split": self.split, "x": x, "y": y, "names": names}
        found |= {"points": points[:, :2], "distance": points[:, 2]}
        for name, values in zip(columns, scores.T.cpu().numpy(), strict=True):
            found |= {name: values[6:].reshape(self.grid, self.grid), f"point_{name}": values[:6]}
        return {name: np.array(value) for name, value in found.items()}

    def _score(self, state: Params, samples: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Mean loss, and accuracy where there are classes, of the network with these tensors; float64."""
        task, parts, labels = self.module.task, [], []
        state = {name: t.to(samples[0][1].device) for name, t in state.items()}
        with self.module.lent.holding(state):
            for x, y in samples:
                out = self.module.net(x)
                right = [(out.argmax(-1) == y).sum()] if task.has_classes else []
                parts.append(torch.stack([task.losses(out, y).sum(dtype=torch.float64), *right]))
                labels.append(task.real(y).sum())
        return sum(parts) / sum(labels)  # type: ignore[return-value]

    def _three(self, round: Received) -> dict[int, Params]:
        """The models of the first three clients, wherever they were trained, on the CPU; {} where there are fewer."""
        like, models = round.start, {}
        chosen = sorted(round.asked[round.sums[self]["held"].cpu().numpy() > 0].tolist())[:THREE]
        for client in chosen if len(chosen) == THREE else ():
            mine = self._held.get(client)
            sent = [mine[name].to(t.device) if mine else torch.zeros_like(t) for name, t in like.items()]
            models[client] = {name: t.cpu() for name, t in zip(like, round.reduce(sent), strict=True)}
        self._held = {}
        return models

    def _samples(self, seed: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """The samples of every measurement, in parts."""
        of_test = self.split == "test"
        known = np.arange(self.data.num_test) if of_test else np.sort(self.data.partition.indices)
        chosen = drawn(known, self.samples, generator(seed, "surface"))
        parts = np.split(chosen, range(AT_ONCE, len(chosen), AT_ONCE))
        if of_test:
            return [fetch_tests(self.data, part) for part in parts]
        return [self.data.fetch(torch.as_tensor(part, device=device), None) for part in parts]


class Plane:
    """The plane through three models: origin in the first, orthonormal axes by Gram–Schmidt, lengths over parameters.

    Args:
        models: three of them, name → ``[*shape]``, on the CPU.
        names: of the parameters. All other tensors follow the same combinations.

    Attributes:
        axes: ``[2, P]``, float64.
        corners: where the models lie, ``[3, 3]``: x, y, and 0 for the distance from the plane.
        is_flat: whether they lie on a line, or in one point.
    """

    def __init__(self, models: list[Params], names: list[str]) -> None:
        self.models, self.names = models, names
        self.origin, *others = map(self._flat, models)
        self.axes = torch.stack(others) - self.origin
        self.width, self.lean, self.height = self.axes[0].norm().item(), 0.0, 0.0
        self.axes[0] /= self.width or 1.0
        for _ in range(2):  # the second time takes what rounding has left
            along = (self.axes[1] @ self.axes[0]).item()
            self.axes[1] -= along * self.axes[0]
            self.lean += along
        self.height = self.axes[1].norm().item()
        self.axes[1] /= self.height or 1.0
        self.corners = np.array([(0.0, 0.0, 0.0), (self.width, 0.0, 0.0), (self.lean, self.height, 0.0)])
        noise = 10 * torch.finfo(models[0][names[0]].dtype).eps
        self.is_flat = not min(self.width, self.height) > noise * max(self.width, np.hypot(self.lean, self.height))

    def at(self, x: float, y: float) -> Params:
        """The model at a point of the plane."""
        third = y / self.height
        second = (x - third * self.lean) / self.width
        one, two, three = self.models
        model = {n: t + second * (two[n] - t) + third * (three[n] - t) for n, t in one.items()}
        return {n: t.clamp(min=0.0) if n.endswith("running_var") else t for n, t in model.items()}

    def project(self, state: Params) -> tuple[float, float, float]:
        """Where a model projects to, and its distance from there; NaN for one that is not finite."""
        apart = self._flat(state) - self.origin
        x, y = (self.axes @ apart).tolist()
        distance = (apart - x * self.axes[0] - y * self.axes[1]).norm().item()
        return (x, y, distance) if np.isfinite(distance) else (np.nan, np.nan, np.nan)

    def _flat(self, model: Params) -> Tensor:
        return torch.cat([model[name].flatten().cpu().double() for name in self.names])


def square(points: np.ndarray, grid: int, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """The nodes ``[grid]`` on x and y of the square around points ``[P, 2]``, those that are NaN left out.

    Its side is the larger extent of the points, and ``margin`` times that on both ends.
    """
    low, high = np.nanmin(points, axis=0), np.nanmax(points, axis=0)
    half = (0.5 + margin) * (high - low).max()
    x, y = (np.linspace(centre - half, centre + half, grid) for centre in (low + high) / 2)
    return x, y
