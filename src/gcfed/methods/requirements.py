"""Requirements that a part declares, each with a reason.

A run that does not meet one is refused by name::

    needs = [
        local_sgd("it counts plain steps"),
        full_uploads("its variates would still travel in full"),
    ]
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Concatenate, ParamSpec

from torch import Tensor, nn
from torch.optim import SGD

from gcfed.aggregators.mean import MeanAggregator
from gcfed.federated.parts import ClientPart, Fact, Need, Order, Output, Setup
from gcfed.optim.partial import has_several_settings
from gcfed.utils.refusal import Refusal

Options = ParamSpec("Options")


def _need(
    lack: Callable[Concatenate[Setup, Options], str],
) -> Callable[Concatenate[str, Options], Need]:
    """Makes a function that takes a reason and options and returns a need.

    Args:
        lack: a rule. It returns what a setup lacks, or an empty string.
    """

    @wraps(lack)
    def declared(reason: str, *args: Options.args, **options: Options.kwargs) -> Need:
        def need(setup: Setup, title: str) -> None:
            lacks = lack(setup, *args, **options)
            if lacks:
                raise Refusal(f"{title} {lacks}: {reason}.")

        return need

    return declared


@_need
def plain_server(setup: Setup, *, any_lr: bool = False, any_start: bool = False) -> str:
    """The server's step is w ← w + Δ (with ``any_lr``, w ← w + lr Δ), and clients start at w
    (unless ``any_start``).
    """
    others = [part.title for part in setup.parts if Fact.MOVES_START in part.facts]
    if others and not any_start:
        return (
            f"does not combine with {others[0]}, whose clients do not start at the server's model"
        )
    optimizer = setup.server_optimizer_probe
    settings = optimizer.defaults
    wrong_lr = settings["lr"] != 1 and not any_lr
    if (
        not isinstance(optimizer, SGD)
        or wrong_lr
        or settings["momentum"]
        or settings["weight_decay"]
    ):
        return f"needs server=sgd{'' if any_lr else ' with server.lr=1'}"
    if has_several_settings(optimizer):
        return "needs a server with the same settings for all parameters"
    return ""


@_need
def local_sgd(setup: Setup, *, momentum: bool = False) -> str:
    """The clients' optimizer is SGD that descends, and no other method moves the weights.

    ``momentum`` allows undamped momentum.
    """
    for other in setup.parts:
        if isinstance(other, ClientPart) and type(other).after_step is not ClientPart.after_step:
            return f"does not combine with {other.title}, which also moves the weights"
    optimizer = setup.local_optimizer_probe
    if not isinstance(optimizer, SGD):
        return f"needs client=sgd, not {type(optimizer).__name__}"
    if has_several_settings(optimizer):
        return "needs a client.optimizer with the same settings for all parameters"
    if optimizer.defaults["maximize"]:
        return "needs client.optimizer.maximize=false"
    if optimizer.defaults["momentum"] and optimizer.defaults["dampening"]:
        return "needs client.optimizer.dampening=0"
    if optimizer.defaults["momentum"] and not momentum:
        return "needs client.optimizer.momentum=0"
    return ""


def _weights_equally(setup: Setup) -> str:
    """The aggregator does not weight clients by their numbers of samples."""
    weighting = getattr(setup.aggregator, "weighting", "uniform")
    return "" if weighting == "uniform" else "needs aggregator.weighting=uniform"


uniform_weights = _need(_weights_equally)


@_need
def whole_batches(setup: Setup) -> str:
    """A mini-batch passes through the network as a whole."""
    return "needs client.accumulate=null" if setup.solver.accumulate > 1 else ""


@_need
def mean_aggregator(setup: Setup, *, uniform: bool = False) -> str:
    """The aggregator is a mean; with ``uniform``, the unweighted mean."""
    if not isinstance(setup.aggregator, MeanAggregator):
        return f"needs aggregator=mean, not {type(setup.aggregator).__name__}"
    return _weights_equally(setup) if uniform else ""


@_need
def functional_network(setup: Setup) -> str:
    """The network can be called on other tensors than its own."""
    reason = setup.module.traits.why_not_functional
    if not reason:
        return ""
    return f"does not combine with model={type(setup.module.net).__name__}, which has {reason}"


teacher = functional_network("it runs a second model")


@_need
def full_uploads(setup: Setup) -> str:
    """Uploads are not quantized."""
    if any(part.order is Order.QUANTIZES for part in setup.parts):
        return "needs quantization=none"
    return ""


def class_logits(setup: Setup, title: str) -> None:
    """Labels are classes and outputs their logits."""
    if not setup.module.task.has_classes:
        task = f"task={type(setup.module.task).__name__}"
        raise Refusal(f"{title} works on the logits of classes, and {task} has none: leave it out.")


@_need
def _network_functions(setup: Setup, *functions: str) -> str:
    """The network has these functions, such as ``features`` and ``head``."""
    net = setup.module.net
    missing = [f"{name}()" for name in functions if not has_function(net, name)]
    if not missing:
        return ""
    lacks = " and no ".join(missing)
    return f"works on parts of the network, but model={type(net).__name__} has no {lacks}"


network_functions = partial(
    _network_functions, "define these methods, or use a network from src/gcfed/models"
)


def check_learned(out: Output, title: str) -> Tensor:
    """Returns the features.

    Raises Refusal if no trained weight comes before the head: a term would do nothing.
    """
    assert out.features_KBF is not None
    if not out.features_KBF.requires_grad:
        raise Refusal(
            f"{title} changes features, but no trained weight comes before the head: add a hidden"
            " layer."
        )
    return out.features_KBF


def has_function(net: nn.Module, name: str) -> bool:
    """Whether a network has such a function; torchvision and timm use these names for other
    things.
    """
    found = getattr(net, name, None)
    if not callable(found) or type(net).__module__.startswith(("torchvision.", "timm.")):
        return False
    return not (name == "stages" and isinstance(found, nn.Module))
