"""Facts about a network: its kinds of layers, and what they allow."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gcfed.utils.ours import is_ours

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)


def first_weight(net: nn.Module) -> Tensor:
    """Its first parameter of the floating-point type that most entries have.

    The inputs have its type and device.
    """
    floats = [parameter for parameter in net.parameters() if parameter.is_floating_point()]
    entries = Counter[torch.dtype]()
    for parameter in floats:
        entries[parameter.dtype] += parameter.numel()
    ((most, _),) = entries.most_common(1)
    return next(parameter for parameter in floats if parameter.dtype == most)


def two_zeros(net: nn.Module, input_shape: Sequence[int]) -> Tensor:
    """Two samples of zeros, ``[2, *input]``: tokens for a network that reads texts."""
    dtype = torch.int64 if hasattr(net, "last_only") else None
    return torch.zeros(2, *input_shape, dtype=dtype)


def has_layers(net: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(layer, kind) for layer in net.modules())


uses_batch_statistics = partial(has_layers, kind=nn.modules.batchnorm._BatchNorm)
has_dropout = partial(has_layers, kind=nn.modules.dropout._DropoutNd)
is_recurrent = partial(has_layers, kind=nn.RNNBase)
has_convolutions = partial(has_layers, kind=nn.modules.conv._ConvNd)


def may_draw(net: nn.Module) -> bool:
    """Whether forward passes may draw random numbers, as those of a user's network may."""
    return has_dropout(net) or not is_ours(type(net).__module__)


def is_known(layer: nn.Module) -> bool:
    """Whether the layer is of a library whose forward passes do the same operations every time."""
    return type(layer).__module__.split(".")[0] in ("gcfed", "torch", "torchvision", "timm")


def shows_all_at_once(net: nn.Module, stack: int | str) -> bool:
    """Whether a single forward pass shows all that the network may do.

    This needs known layers and no hooks. The network must also be this project's, or its clients
    must train one by one.
    """
    if _has_hooks(net):
        return False
    for layer in net.modules():
        if isinstance(layer, torch.jit.ScriptModule) or not is_known(layer):
            return False
    if is_ours(type(net).__module__):
        return True
    if stack == "auto" and (has_convolutions(net) or has_dropout(net)):
        return True  # ``make_layout`` then has one client
    return stack == 1 or bool(cannot_stack(net))


def _has_hooks(net: nn.Module) -> bool:
    parts = [*net.modules(), *net.parameters(), *net.buffers()]
    return any(getattr(part, kind, None) for part in parts for kind in _HOOKS)


def is_recordable_network(net: nn.Module) -> bool:
    """Whether a CUDA graph can record a forward pass. A user's module must declare ``recordable =
    True``.
    """
    return all(is_known(layer) or getattr(layer, "recordable", False) for layer in net.modules())


def keeps_statistics_of_instances(net: nn.Module) -> bool:
    """Whether a layer averages the statistics of single samples over its batches."""
    for layer in net.modules():
        if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
            return True
    return False


def cannot_stack(net: nn.Module) -> str:
    """Why several clients of this network cannot train in one stack; empty if its
    layers allow it.
    """
    mix = "would mix with the padding of shorter batches. Set client.stack=1"
    if uses_batch_statistics(net):
        return f"batch normalisation: its statistics {mix}, or use GroupNorm"
    if keeps_statistics_of_instances(net):
        return f"running statistics, which {mix}"
    for layer in net.modules():
        if isinstance(layer, nn.Embedding) and None not in (layer.padding_idx, layer.max_norm):
            return "an nn.Embedding with padding_idx and max_norm. Set client.stack=1"
    if is_recurrent(net):
        return "recurrent layers: torch.func.vmap cannot batch them. Set client.stack=1"
    return ""


def activation_bytes(net: nn.Module, sample: Tensor) -> int:
    """Bytes that a forward pass of one sample, ``[1, *input]``, keeps for its backward pass.

    Attention counts with its scores, which it keeps in a stack.
    """
    parameter_memory = set[int]()
    for t in (*net.parameters(), *net.buffers()):
        if t.layout == torch.strided:
            parameter_memory.add(t.untyped_storage().data_ptr())
    kept: dict[int, Tensor] = {}  # by memory, because several operations may keep one tensor

    def note(t: Tensor) -> Tensor:
        if t.layout == torch.strided and t.untyped_storage().data_ptr() not in parameter_memory:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with (
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        torch.autograd.graph.saved_tensors_hooks(note, lambda t: t),
    ):
        net(sample)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def leaves(loss: Tensor) -> set[int]:
    """The ids of the tensors to which a backward pass adds gradients."""
    todo = [loss.grad_fn]
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
    return {id(node.variable) for node in seen if hasattr(node, "variable")}
