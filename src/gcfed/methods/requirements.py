"""What a method asks of the rest of the algorithm, refused by name where it is not so; for ``validate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import SGD

from gcfed.federated.aggregate import MeanAggregator
from gcfed.federated.solver import build_on_nothing

if TYPE_CHECKING:
    from gcfed.federated.loop import FederatedLoop
    from gcfed.federated.module import FederatedModule
    from gcfed.federated.store import ClientStore


def plain_server(module: FederatedModule, method: str, reason: str, *, any_lr: bool = False) -> None:
    """The server optimizer must be SGD without momentum and with lr 1, w ← w + Δ, or with ``any_lr``, w ← w + lr Δ.

    Raises:
        ValueError: it is not.
    """
    optimizer = build_on_nothing(module.server)
    settings = optimizer.defaults
    wrong_lr = settings["lr"] != 1 and not any_lr
    if not isinstance(optimizer, SGD) or wrong_lr or settings["momentum"] or settings["weight_decay"]:
        raise ValueError(f"{method} needs server=sgd{'' if any_lr else ' with server.lr=1'}: {reason}.")


def local_sgd(loop: FederatedLoop, method: str, reason: str, *, momentum: bool) -> None:
    """The clients' optimizer must be SGD; with ``momentum=False``, without momentum.

    Raises:
        ValueError: it is not.
    """
    optimizer = build_on_nothing(loop.solver.optimizer)
    if not isinstance(optimizer, SGD):
        raise ValueError(f"{method} needs client=sgd, not {type(optimizer).__name__}: {reason}.")
    if not momentum and optimizer.defaults["momentum"]:
        raise ValueError(f"{method} needs client.optimizer.momentum=0: {reason}.")


def uniform_mean(loop: FederatedLoop, method: str, reason: str) -> None:
    """The aggregator must be the plain mean over the cohort.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(loop.aggregator, MeanAggregator) or loop.aggregator.weighting != "uniform":
        raise ValueError(f"{method} needs aggregator.weighting=uniform: {reason}.")


def mean_aggregator(loop: FederatedLoop, method: str, reason: str) -> None:
    """The aggregator must be a mean, weighted or not, which has no use for the shapes of tensors.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(loop.aggregator, MeanAggregator):
        raise ValueError(f"{method} needs aggregator=gcfed.federated.aggregate.MeanAggregator: {reason}.")


def full_uploads(loop: FederatedLoop, method: str, reason: str) -> None:
    """Uploads must not be quantized.

    Raises:
        ValueError: they are.
    """
    if any(m.quantizes for m in loop.methods):
        raise ValueError(f"{method} needs quantization=none: {reason}.")


def only_correction(loop: FederatedLoop) -> None:
    """No two methods may correct the clients' drift: each would take the other's correction for drift.

    Raises:
        ValueError: two do.
    """
    names = [type(m).__name__ for m in loop.methods if m.corrects_drift]
    if len(names) > 1:
        raise ValueError(
            f"methods: {' and '.join(names)} each correct the clients' drift, and would correct each other: keep one."
        )


def exact_store(store: ClientStore, method: str) -> None:
    """Clients' states must be kept in the type of the model.

    Raises:
        ValueError: they are rounded.
    """
    if store.dtype is not None:
        raise ValueError(
            f"{method} needs client_store.dtype=null: a client's state is a running sum there, in which small steps "
            "would be lost to rounding, round after round."
        )


def network_parts(module: FederatedModule, method: str, *parts: str) -> None:
    """The network must have these methods, such as ``features`` and ``head``.

    Raises:
        ValueError: it lacks one.
    """
    if missing := [f"{part}()" for part in parts if not hasattr(module.net, part)]:
        raise ValueError(
            f"{method} works on parts of the network, but model={type(module.net).__name__} has no "
            f"{' and no '.join(missing)}: give it these methods, or take one of configs/model."
        )
