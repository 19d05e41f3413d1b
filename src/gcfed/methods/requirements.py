"""What a method asks of the rest of the algorithm, refused by name where it is not so; for ``validate``."""

from torch import nn
from torch.optim import SGD

from gcfed.federated.aggregate import MeanAggregator
from gcfed.federated.method import ClientPart, Order, Setup
from gcfed.federated.store import ClientStore
from gcfed.optim.partial import probe_optimizer


def plain_server(setup: Setup, method: str, reason: str, *, any_lr: bool = False) -> None:
    """The server optimizer must be SGD without momentum and with lr 1, w ← w + Δ, or with ``any_lr``, w ← w + lr Δ.

    Raises:
        ValueError: it is not, or clients start elsewhere than at w.
    """
    if elsewhere := [part.title for part in setup.parts if part.moves_start]:
        raise ValueError(f"{method} does not go with {elsewhere[0]}, whose clients start elsewhere: {reason}.")
    optimizer = probe_optimizer(setup.module.server)
    settings = optimizer.defaults
    wrong_lr = settings["lr"] != 1 and not any_lr
    if not isinstance(optimizer, SGD) or wrong_lr or settings["momentum"] or settings["weight_decay"]:
        raise ValueError(f"{method} needs server=sgd{'' if any_lr else ' with server.lr=1'}: {reason}.")


def local_sgd(setup: Setup, method: str, reason: str, *, momentum: bool) -> None:
    """The clients' optimizer must be SGD, with ``momentum=False`` without momentum, and alone in moving the weights.

    Raises:
        ValueError: it is not.
    """
    for other in setup.parts:
        if isinstance(other, ClientPart) and type(other).after_step is not ClientPart.after_step:
            raise ValueError(f"{method} does not go with {other.title}, which moves the weights too: {reason}.")
    optimizer = probe_optimizer(setup.solver.optimizer)
    if not isinstance(optimizer, SGD):
        raise ValueError(f"{method} needs client=sgd, not {type(optimizer).__name__}: {reason}.")
    if not momentum and optimizer.defaults["momentum"]:
        raise ValueError(f"{method} needs client.optimizer.momentum=0: {reason}.")


def uniform_mean(setup: Setup, method: str, reason: str) -> None:
    """The aggregator must be the plain mean over the cohort.

    Raises:
        ValueError: it is not.
    """
    mean_aggregator(setup, method, reason)
    uniform_weights(setup, method, reason)


def uniform_weights(setup: Setup, method: str, reason: str) -> None:
    """The aggregator must not weight clients by their numbers of samples.

    Raises:
        ValueError: it does.
    """
    if getattr(setup.aggregator, "weighting", "uniform") != "uniform":
        raise ValueError(f"{method} needs aggregator.weighting=uniform: {reason}.")


def mean_aggregator(setup: Setup, method: str, reason: str) -> None:
    """The aggregator must be a mean, weighted or not, which has no use for the shapes of tensors.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(setup.aggregator, MeanAggregator):
        raise ValueError(f"{method} needs aggregator=mean, not {type(setup.aggregator).__name__}: {reason}.")


def full_uploads(setup: Setup, method: str, reason: str) -> None:
    """Uploads must not be quantized.

    Raises:
        ValueError: they are.
    """
    if any(part.order is Order.QUANTIZES for part in setup.parts):
        raise ValueError(f"{method} needs quantization=none: {reason}.")


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


def network_parts(setup: Setup, method: str, *parts: str) -> None:
    """The network must have these methods, such as ``features`` and ``head``.

    Raises:
        ValueError: it lacks one.
    """
    if missing := [f"{part}()" for part in parts if not has_part(setup.module.net, part)]:
        raise ValueError(
            f"{method} works on parts of the network, but model={type(setup.module.net).__name__} has no "
            f"{' and no '.join(missing)}: give it these methods, or take one of src/gcfed/models."
        )


def has_part(net: nn.Module, part: str) -> bool:
    """Whether a network has such a part; torchvision's and timm's mean others by these names."""
    found, theirs = getattr(net, part, None), type(net).__module__.startswith(("torchvision.", "timm."))
    return callable(found) and not theirs and not (part == "stages" and isinstance(found, nn.Module))
