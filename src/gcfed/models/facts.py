"""Facts about a network: its kinds of layers, and what they allow."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def first_weight(net: nn.Module) -> Tensor:
    """Its first parameter of the floating-point type that most entries have.

    The inputs have its type and device.
    """
    floats = [p for p in net.parameters() if p.is_floating_point()]
    types = dict.fromkeys(p.dtype for p in floats)
    most = max(types, key=lambda dtype: sum(p.numel() for p in floats if p.dtype == dtype))
    return next(p for p in floats if p.dtype == most)


def two_zeros(net: nn.Module, input_shape: Sequence[int]) -> Tensor:
    """Two samples of zeros, ``[2, *input]``: tokens for a network that reads texts."""
    return torch.zeros(2, *input_shape, dtype=torch.int64 if hasattr(net, "last_only") else None)


def has_layers(net: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(m, kind) for m in net.modules())


uses_batch_statistics = partial(has_layers, kind=nn.modules.batchnorm._BatchNorm)
has_dropout = partial(has_layers, kind=nn.modules.dropout._DropoutNd)
is_recurrent = partial(has_layers, kind=nn.RNNBase)
has_convolutions = partial(has_layers, kind=nn.modules.conv._ConvNd)


def is_known(layer: nn.Module) -> bool:
    """Whether it is a layer of these libraries, whose forward passes do the same operations every
    time.
    """
    return type(layer).__module__.split(".")[0] in ("gcfed", "torch", "torchvision", "timm")


def shows_all_at_once(net: nn.Module, stack: int | str) -> bool:
    """Whether one pass shows all: known layers, no hooks, and the network is this project's or
    trains one by one.
    """
    kinds = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
    )
    parts = [*net.modules(), *net.parameters(), *net.buffers()]
    hooked = any(getattr(part, kind, None) for part in parts for kind in kinds)
    if hooked or any(
        isinstance(m, torch.jit.ScriptModule) or not is_known(m) for m in net.modules()
    ):
        return False
    # ``Stacks.layout`` then has one client
    auto = stack == "auto" and (has_convolutions(net) or has_dropout(net))
    return (
        type(net).__module__.startswith("gcfed.") or auto or stack == 1 or bool(cannot_stack(net))
    )


def is_graphable(net: nn.Module) -> bool:
    """Whether a CUDA graph can record a forward pass; a user's module must declare it: ``graphable
    = True``.
    """
    return all(is_known(m) or getattr(m, "graphable", False) for m in net.modules())


def cannot_stack(net: nn.Module) -> str:
    """Why several clients of this network cannot train in one stack; empty if its
    layers allow it.
    """
    mix = "would mix with the padding of shorter batches. Set client.stack=1"
    if uses_batch_statistics(net):
        return f"batch normalisation: its statistics {mix}, or use GroupNorm"
    if any(
        isinstance(m, nn.modules.instancenorm._InstanceNorm) and m.track_running_stats
        for m in net.modules()
    ):
        return f"running statistics, which {mix}"
    if is_recurrent(net):
        return "recurrent layers: torch.func.vmap cannot batch them. Set client.stack=1"
    return ""


def activation_bytes(net: nn.Module, sample: Tensor) -> int:
    """Bytes that a forward pass of one sample, ``[1, *input]``, keeps for its backward pass.

    Attention counts with its scores, which it keeps in a stack.
    """
    own = set[int]()
    for t in (*net.parameters(), *net.buffers()):
        if t.layout == torch.strided:
            own.add(t.untyped_storage().data_ptr())
    kept: dict[int, Tensor] = {}  # by memory, because several operations may keep one tensor

    def note(t: Tensor) -> Tensor:
        if t.layout == torch.strided and t.untyped_storage().data_ptr() not in own:
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
    todo, seen = [loss.grad_fn], set()
    while todo:
        if (node := todo.pop()) is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return {id(node.variable) for node in seen if hasattr(node, "variable")}
