"""Refuses networks that no federated run can train correctly, and finds the constants that training
changes.
"""

import logging
from collections.abc import Iterable
from textwrap import shorten

import torch
from safetensors.torch import save
from torch import Tensor, nn

from gcfed.federated.network.lent_network import new_memory
from gcfed.federated.network.probing.passes import Pass, Passes
from gcfed.federated.network.tap import dense_buffers
from gcfed.models.spectral import unit_vectors
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)


def refuse_untrainable(passes: Passes, first: Pass) -> None:
    """Raises Refusal if no federated run can train the network correctly."""
    _refuse_parameters(passes, first)
    _refuse_sparse_buffers(passes)
    _refuse_unknown_types(passes)
    _refuse_buffers(passes, first)


def _refuse_parameters(passes: Passes, first: Pass) -> None:
    new = {name for name, _ in passes.net.named_parameters()} - passes.before.keys()
    if new:
        raise Refusal(
            f"{passes.name} makes the parameter {few(sorted(new))} in forward, where no"
            " optimizer knows it: make it in __init__, or use a layer such as nn.LazyLinear."
        )
    replaced = sorted(passes.replaced & {*passes.trained})
    if replaced:
        raise new_memory(replaced[0])
    if any(t.layout != torch.strided for t in first.grads):
        raise Refusal(f"{passes.name} gets sparse gradients: set sparse=False in its layers.")
    held = {id(t) for t in passes.lent_network.tensors.values() if isinstance(t, nn.Parameter)}
    if {id(p) for p in passes.net.parameters()} != held:
        raise Refusal(
            f"{passes.name}.parameters() lacks some: set requires_grad=False in those instead."
        )


def _refuse_sparse_buffers(passes: Passes) -> None:
    saved = passes.net.state_dict()
    for name, t in passes.net.named_buffers():
        if name in saved and t.layout != torch.strided:
            raise Refusal(
                f"{passes.name} has the sparse buffer {name}: register it with persistent=False,"
                " because global_model.safetensors cannot hold it, or make it dense."
            )


def _refuse_unknown_types(passes: Passes) -> None:
    for name, t in passes.net.state_dict().items():
        if isinstance(t, Tensor) and not is_exportable(t.dtype):
            raise Refusal(
                f"{passes.name} has {name} of the type {t.dtype}, which global_model.safetensors"
                " cannot hold: use another type, such as torch.complex64."
            )


def _refuse_buffers(passes: Passes, first: Pass) -> None:
    before = passes.before
    changing = {*passes.trained, *first.changed}
    imaginary = [name for name, t in before.items() if t.is_complex() and name in changing]
    if imaginary:
        raise Refusal(
            f"{passes.name} changes the complex {few(imaginary)}: keep torch.view_as_real of it."
        )
    saved = passes.net.state_dict()
    new = {name for name in dense_buffers(passes.net) if name in saved} - before.keys()
    if new:
        raise Refusal(
            f"{passes.name} makes the buffer {few(sorted(new))} in forward: register its value"
            " in __init__."
        )
    resized = [name for name in first.changed if first.tensors[name].shape != before[name].shape]
    if resized:
        raise Refusal(
            f"{passes.name} changes the shape of {few(resized)}: give a buffer one size in"
            " __init__."
        )


def averaged_constants(passes: Passes, first: Pass) -> tuple[str, ...]:
    """The constants that training changes. The server averages them.

    Raises Refusal for a constant that has no mean.
    """
    saved = passes.net.state_dict()
    repaired = unit_vectors(passes.net)
    constants = sorted(name for name in first.changed if name not in passes.trained)
    lost = [name for name in constants if name not in saved]
    if lost:
        log.warning(
            "%s changes %s, which no checkpoint has (persistent=False): clients begin each"
            " round with its first value.",
            passes.name,
            few(lost),
        )
    averaged = []
    for name in constants:
        if name in lost:
            continue
        old = passes.before[name]
        why = why_no_mean(old, first.tensors[name], is_repaired=name in repaired)
        if why:
            raise Refusal(
                f"{passes.name} changes {name}, which {why}, or register it with"
                " persistent=False, so that clients begin anew."
            )
        is_parameter = isinstance(passes.lent_network.tensors[name], nn.Parameter)
        if is_parameter or not old.is_floating_point():
            averaged.append(name)
    if averaged:
        log.info(
            "%s: training changes %s, which are averaged like buffers", passes.name, few(averaged)
        )
    return tuple(averaged)


def is_exportable(dtype: torch.dtype) -> bool:
    """Whether safetensors can hold tensors of this type."""
    try:
        save({"t": torch.empty(0, dtype=dtype)})
    except Exception:  # its type differs between versions of safetensors
        return False
    return True


def why_no_mean(old: Tensor, new: Tensor, is_repaired: bool) -> str:
    """Why clients' values of a tensor that passes change cannot be averaged; empty if they can.

    Args:
        is_repaired: whether the server makes its mean a unit vector again.
    """
    if not old.isfinite().all():
        return "begins at ±∞, so no difference to it can be sent: begin it at a finite number"
    if not is_repaired and _has_unit_rows(old) and _has_unit_rows(new):
        return (
            "has unit norm, and a mean of unit vectors is shorter: normalise it where forward"
            " reads it"
        )
    return ""


def _has_unit_rows(t: Tensor) -> bool:
    if not t.is_floating_point() or t.dim() == 0 or t.shape[-1] <= 1:
        return False
    return bool((t.norm(dim=-1) - 1).abs().max() < 1e-4)


def few(names: Iterable[str]) -> str:
    """The first of these names, in at most 100 characters."""
    return shorten(", ".join(names), 100, placeholder=" …")
