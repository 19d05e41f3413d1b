"""The loss around three clients of a round, as in FedACG's Figure 2(a): ``surface_round_<t>.npz``.

==============================
======================================================================================= ``x``, ``y``
``[G]``            the grid's axes ``loss``, ``acc`` ``[G, G]``    at y (row) and x (column);
``acc`` only with classes ``names`` ``[6]``               ``client <id>`` three times, ``mean`` (of
the three), ``broadcast``, ``global`` ``points`` ``[6, 2]``           their positions, x and y
``point_loss``, ``point_acc``   ``[6]``, of the models themselves ``distance`` ``[6]``
from the plane ``round``, ``split``            rounds finished; where the samples are from
==============================
=======================================================================================
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from gcfed.federated.parallel.strategy import rank_and_world
from gcfed.federated.parts import ClientStack, Download, Params, Received, Round, Setup
from gcfed.federated.protocol.checks import finite_clients
from gcfed.metrics.base import AT_ONCE, ClientMetric, drawn, evaluating, fetch_tests
from gcfed.plots.style import BLACK, BLUE, ORANGE, VERMILION, save, styled
from gcfed.utils.checked import Count, Weight, checked
from gcfed.utils.files import replacing
from gcfed.utils.rng import generator

log = logging.getLogger(__name__)
THREE = 3

#: Models on the plane of a loss surface: marker, colour, size and name. Local models have the
#: default.
MARKS = {
    "mean": ("D", ORANGE, 7, "their mean"),
    "broadcast": ("s", BLUE, 7, "broadcast model"),
    "global": ("*", VERMILION, 13, "new global model"),
}


@checked
@dataclass(eq=False)
class Surface(ClientMetric):
    """Evaluates the network on the plane through three clients' models, at the nodes of a square
    grid.

    w₁, w₂ and w₃ are the local models of the cohort's first three clients, by id. There is no file
    if one of them is not finite or missing. The origin is w₁ and the first axis is along w₂ − w₁.
    The second is orthogonal to it, towards w₃, in the same unit (Euclidean distance over all
    parameters). The broadcast and the new global model are off the plane; their projections are
    marked. Floating-point buffers follow the same combinations; a running variance below 0 becomes
    0. All models are evaluated in the precision of their weights.

    A measured round costs grid² + 6 passes over the samples, divided among the processes. It adds
    nothing to the rows.

    Raises ValueError at ``validate`` if the cohort has fewer than three clients.
    """

    folder: str
    every: Count = 100
    grid: Annotated[int, Field(ge=2, le=1000)] = 21
    margin: Weight = 0.25
    samples: Count | None = 500
    split: Literal["test", "train"] = "train"
    figures: bool = True

    def validate(self, setup: Setup) -> None:
        super().validate(setup)
        if setup.cohort < THREE:
            raise ValueError(
                f"metrics=surface needs three clients, not participation.per_round={setup.cohort}."
            )

    def zeros(self, round: Round) -> Params:
        return {name: t.new_zeros(THREE, *t.shape) for name, t in round.start.items()}

    def note(self, stack: ClientStack, download: Download) -> Params:
        """Name → ``[3, *shape]``: the models of the three clients; zeros for a client that is not
        in this stack.
        """
        rows, places = np.nonzero(stack.clients[:, None] == np.sort(download.cohort)[:THREE])
        note = {name: t.new_zeros(THREE, *t.shape[1:]) for name, t in stack.full.items()}
        for name, t in note.items():
            t[places] = stack.full[name][rows]
        return note

    def columns(self, round: Received) -> dict[str, float]:
        found = self._measure(round)
        if rank_and_world()[0] != 0:
            return {}
        if not found:
            log.warning(
                "round %d: no three finite local models that span a plane; no loss surface",
                round.index + 1,
            )
            return {}
        path = Path(self.folder) / f"surface_round_{round.index + 1}.npz"
        with replacing(path) as temporary:
            np.savez(temporary, **found)  # type: ignore[arg-type]
        if self.figures:
            picture = path.with_suffix(".png")
            plot_surface(found, picture)
            self.show(picture, round)
        return {}

    def _measure(self, round: Received) -> dict[str, np.ndarray]:
        """The file's contents; {} if there is no plane.

        Every process computes some of the points.
        """
        models_3, clients = round.sums[self], np.sort(round.asked)[:THREE]
        if np.isin(clients, round.cohort).sum() < THREE or not finite_clients(models_3).all():
            return {}
        three = [{name: t[i].cpu() for name, t in models_3.items()} for i in range(THREE)]
        if (plane := Plane(three, self.names)).is_flat:
            return {}
        others = [round.start, self.module.broadcast_state()]
        points = np.array([*plane.corners, plane.corners.mean(0), *map(plane.project, others)])
        x, y = square(points[:, :2], self.grid, self.margin)
        nodes = [(a, b) for b in y.tolist() for a in x.tolist()]
        states = [*three, plane.at(*points[3, :2].tolist()), *others]
        columns = ("loss", "acc") if self.module.task.has_classes else ("loss",)
        samples = self._samples(round.seed, self.module.device)
        scores = round.zeros(len(states) + len(nodes), len(columns))
        rank, world = rank_and_world()
        with evaluating(self.module.net):
            for i in range(rank, len(scores), world):
                state = states[i] if i < len(states) else plane.at(*nodes[i - len(states)])
                scores[i] = self._score(state, samples)
        (scores,) = round.reduce([scores])
        names = [*(f"client {client}" for client in clients), "mean", "broadcast", "global"]
        found = {"round": round.index + 1, "split": self.split, "x": x, "y": y, "names": names}
        found |= {"points": points[:, :2], "distance": points[:, 2]}
        for name, values in zip(columns, scores.T.cpu().numpy(), strict=True):
            found |= {name: values[6:].reshape(self.grid, self.grid), f"point_{name}": values[:6]}
        return {name: np.array(value) for name, value in found.items()}

    def _score(self, state: Params, samples: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Mean loss of the network with these tensors, and accuracy if there are
        classes; float64.
        """
        task, parts, labels = self.module.task, [], []
        state = {name: t.to(samples[0][1].device) for name, t in state.items()}
        with self.module.lent.holding(state):
            for x, y in samples:
                out = self.module.net(x)
                right = [(out.argmax(-1) == y).sum()] if task.has_classes else []
                parts.append(torch.stack([task.losses(out, y).sum(dtype=torch.float64), *right]))
                labels.append(task.real(y).sum())
        return sum(parts) / sum(labels)  # type: ignore[return-value]

    def _samples(self, seed: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """The samples of every measurement, in batches."""
        known = (
            np.arange(self.data.num_test)
            if self.split == "test"
            else np.sort(self.data.partition.indices)
        )
        chosen = drawn(known, self.samples, generator(seed, "surface"))
        parts = np.split(chosen, range(AT_ONCE, len(chosen), AT_ONCE))
        if self.split == "test":
            return [fetch_tests(self.data, part) for part in parts]
        return [self.data.fetch(torch.as_tensor(part, device=device), None) for part in parts]


class Plane:
    """The plane through three models.

    Its origin is the first model; its axes are orthonormal over all parameters.

    Args:
        models: three models, name → ``[*shape]``, on the CPU.
        names: the parameters. The other tensors follow the same linear combinations.

    Attributes:
        axes: ``[2, P]``, float64.
        corners: the positions of the models, ``[3, 3]``: x, y, and the distance 0 from the plane.
        is_flat: whether the models lie on a line or in one point.
    """

    def __init__(self, models: list[Params], names: list[str]) -> None:
        self.models, self.names = models, names
        self.origin, *others = map(self._flat, models)
        q, r = torch.linalg.qr(torch.stack(others, 1) - self.origin[:, None])
        signs = r.diagonal().sign()
        self.axes, self.coordinates = (q * signs).T, (r * signs[:, None]).numpy()
        self.corners = np.pad(self.coordinates.T, ((1, 0), (0, 1)))
        (width, lean), (_, height) = self.coordinates
        noise = 10 * torch.finfo(models[0][names[0]].dtype).eps
        self.is_flat = not min(width, height) > noise * max(width, np.hypot(lean, height))

    def at(self, x: float, y: float) -> Params:
        """The model at a point of the plane."""
        second, third = np.linalg.solve(self.coordinates, [x, y]).tolist()
        one, two, three = self.models
        model = {n: t + second * (two[n] - t) + third * (three[n] - t) for n, t in one.items()}
        return {n: t.clamp(min=0.0) if n.endswith("running_var") else t for n, t in model.items()}

    def project(self, state: Params) -> tuple[float, float, float]:
        """The position of a model's projection, and its distance from the plane; NaN if the model
        is not finite.
        """
        difference = self._flat(state) - self.origin
        x, y = (self.axes @ difference).tolist()
        distance = (difference - x * self.axes[0] - y * self.axes[1]).norm().item()
        return (x, y, distance) if np.isfinite(distance) else (np.nan, np.nan, np.nan)

    def _flat(self, model: Params) -> Tensor:
        return torch.cat([model[name].flatten().cpu().double() for name in self.names])


def square(points: np.ndarray, grid: int, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """The x and y coordinates, ``[grid]`` each, of a square grid around the finite ones of the
    points ``[P, 2]``.

    The side of the square is the larger extent of the points, plus ``margin`` times this extent at
    both ends.
    """
    low, high = np.nanmin(points, axis=0), np.nanmax(points, axis=0)
    half = (0.5 + margin) * (high - low).max()
    x, y = (np.linspace(centre - half, centre + half, grid) for centre in (low + high) / 2)
    return x, y


@styled
def plot_surface(surface: Mapping[str, np.ndarray], path: str | Path) -> Figure:
    """Contour lines of the loss and six models on the plane through three local ones, as FedACG's
    Figure 2(a).

    ``surface`` is what ``surface_round_<t>.npz`` holds, for instance by ``numpy.load``.
    """
    figure = Figure(figsize=(7.6, 5.2))
    axes = figure.subplots()
    loss_GG = np.ma.masked_invalid(surface["loss"])
    low, high = loss_GG.min(), loss_GG.max()
    if low < high:
        # Equal ratios, unless a loss is negative.
        levels = (
            np.linspace(low, high, 16) if low < 0 else np.geomspace(max(low, 1e-6 * high), high, 16)
        )
        lines = axes.contour(
            surface["x"], surface["y"], loss_GG, levels=levels[1:-1], cmap="cividis", linewidths=1.2
        )
        axes.clabel(lines, levels[1:-1:2], fmt="%.3g", fontsize=7)
    rows = zip(
        surface["names"], surface["points"], surface["point_loss"], surface["distance"], strict=True
    )
    for i, (name, (x, y), loss, distance) in enumerate(rows):
        marker, colour, size, words = MARKS.get(name, ("o", BLACK, 7, f"w{'₁₂₃'[i % 3]}, {name}"))
        if name not in MARKS:
            axes.annotate(words[:2], (x, y), xytext=(5, 5), textcoords="offset points")
        label = f"{words}: {loss:.3g}" + (
            f",\n{distance:.3g} off the plane" if distance > 0 else ""
        )
        axes.plot(
            x,
            y,
            marker,
            color=colour,
            markersize=size,
            markeredgecolor="white",
            label=label,
            zorder=3,
        )
    unit = "nats" if "acc" in surface else "squared error / 2"
    title = f"{surface['split']} loss ({unit}) around three clients of round {surface['round']}"
    title = title.capitalize()
    axes.set(
        xlabel="along w₂ − w₁ (Euclidean distance of the weights)",
        ylabel="across, towards w₃ (same unit)",
    )
    axes.set(title=title, aspect="equal", xlim=surface["x"][[0, -1]], ylim=surface["y"][[0, -1]])
    axes.grid(visible=False)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.02, 1),
        title=f"{surface['split']} loss",
        alignment="left",
    )
    save(figure, path)
    return figure
