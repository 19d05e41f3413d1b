"""Facts about a network: its kinds of layers, and which of its tensors travel."""

from collections.abc import Sequence
from functools import partial

from torch import nn

from gcfed.federated.training.forward import Params


def has_layers(net: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(m, kind) for m in net.modules())


uses_batch_statistics = partial(has_layers, kind=nn.modules.batchnorm._BatchNorm)
has_dropout = partial(has_layers, kind=nn.modules.dropout._DropoutNd)
is_recurrent = partial(has_layers, kind=nn.RNNBase)
has_convolutions = partial(has_layers, kind=nn.modules.conv._ConvNd)


def is_known(layer: nn.Module) -> bool:
    """Whether it is a layer of these libraries, whose forward passes do the same operations every time."""
    return type(layer).__module__.split(".")[0] in ("gcfed", "torch", "torchvision", "timm")


def is_graphable(net: nn.Module) -> bool:
    """Whether a CUDA graph can record a forward pass; a user's module must declare it: ``graphable = True``."""
    return all(is_known(m) or getattr(m, "graphable", False) for m in net.modules())


def cannot_stack(net: nn.Module) -> str:
    """Why several clients of this network cannot train in one stack; empty if its layers allow it."""
    if uses_batch_statistics(net):
        return (
            "batch normalisation: its statistics would mix with the padding of shorter batches. Set client.stack=1, "
            "or use GroupNorm"
        )
    if any(isinstance(m, nn.modules.instancenorm._InstanceNorm) and m.track_running_stats for m in net.modules()):
        return "running statistics, which would mix with the padding of shorter batches. Set client.stack=1"
    if is_recurrent(net):
        return "recurrent layers: torch.func.vmap cannot batch them. Set client.stack=1"
    return ""


def travelling(net: nn.Module) -> tuple[str, ...]:
    """Names of the tensors that server and clients exchange: trained parameters and finite floating-point buffers.

    Frozen parameters, integers and masks of −∞ are constants. If a forward pass changes one, the probe finds it
    (:mod:`gcfed.federated.training.probe`). A buffer with ``persistent=False`` starts again each round.
    """
    kept = net.state_dict(keep_vars=True)
    params = [name for name, p in net.named_parameters() if p.requires_grad]
    floats = [name for name, b in net.named_buffers() if name in kept and b.is_floating_point()]
    buffers = [name for name in floats if bool(kept[name].isfinite().all())]
    return (*params, *buffers)


def broadcast_state(net: nn.Module, names: Sequence[str] | None = None) -> Params:
    """Copies of these tensors, by default of all that travel, name → ``[*shape]``; integers as float32."""
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    chosen = {name: tensors[name].detach() for name in names or travelling(net)}
    return {name: t.clone() if t.is_floating_point() else t.float() for name, t in chosen.items()}
