"""Facts about a network: its kinds of layers, and what they allow."""

from functools import partial

import torch
from torch import nn


def has_layers(net: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(m, kind) for m in net.modules())


uses_batch_statistics = partial(has_layers, kind=nn.modules.batchnorm._BatchNorm)
has_dropout = partial(has_layers, kind=nn.modules.dropout._DropoutNd)
is_recurrent = partial(has_layers, kind=nn.RNNBase)
has_convolutions = partial(has_layers, kind=nn.modules.conv._ConvNd)


def is_known(layer: nn.Module) -> bool:
    """Whether it is a layer of these libraries, whose forward passes do the same operations every time."""
    return type(layer).__module__.split(".")[0] in ("gcfed", "torch", "torchvision", "timm")


def shows_all_at_once(net: nn.Module) -> bool:
    """Whether it has only layers of known libraries and no hooks, so that one pass shows all."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks")
    parts = [*net.modules(), *net.parameters(), *net.buffers()]
    hooked = any(getattr(part, kind, None) for part in parts for kind in kinds)
    return not hooked and all(is_known(m) and not isinstance(m, torch.jit.ScriptModule) for m in net.modules())


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
