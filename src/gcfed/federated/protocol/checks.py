"""Which messages can be added up, and which are of another model or method."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from math import inf

import torch
from torch import Tensor

from gcfed.federated.protocol.messages import MessageError, Params, Upload
from gcfed.utils.bounds import is_below
from gcfed.utils.layout import in_memory_order


def finite_clients(tensors_K: Mapping[str, Tensor], limit: float = inf) -> Tensor:
    """Which clients sent finite numbers only, bool ``[K]``. The host does not wait for the device.

    Numbers must also be below ``limit`` (``Aggregator.limit``), except those in float64, which are
    added as they are.
    """
    filled = [t for t in tensors_K.values() if t.numel()]
    first = next(iter(tensors_K.values()))
    if not filled:
        return torch.ones(len(first), dtype=torch.bool, device=first.device)
    limits = [inf if t.dtype is torch.float64 else limit for t in filled]
    if first.is_cuda:
        return _finite_on_gpu(filled, limits)
    return _finite_on_cpu(filled, limits)


def _finite_on_gpu(tensors_K: Sequence[Tensor], limits: Sequence[float]) -> Tensor:
    """Uses few kernels for all tensors and clients.

    A CPU would take three to eight times as long as with :func:`_finite_on_cpu`.
    """
    by_limit = defaultdict(list)
    for t, limit in zip(tensors_K, limits, strict=True):
        by_limit[limit].append(t.reshape(len(t), -1))
    finite = []
    for limit, flat in by_limit.items():
        low_K, high_K = torch.cat(flat, 1).aminmax(dim=1)
        finite.append((-limit < low_K) & (high_K < limit))
    return torch.stack(finite).all(0)


def _finite_on_cpu(tensors_K: Sequence[Tensor], limits: Sequence[float]) -> Tensor:
    first = tensors_K[0]
    if len(first) == 1:  # indexing takes time too
        return torch.tensor([_is_finite(tensors_K, limits)], device=first.device)
    finite = [_is_finite(tensors, limits) for tensors in zip(*tensors_K, strict=True)]
    return torch.tensor(finite, device=first.device)


def _is_finite(tensors: Sequence[Tensor], limits: Sequence[float]) -> bool:
    """Whether all numbers of a client are within the limits. NaN is not."""
    (flat,) = in_memory_order(tensors)
    return all(is_below(t, limit) for t, limit in zip(flat, limits, strict=True))


def are_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether all floats of all tensors are finite, bool ``[]`` on the device of the first one."""
    floats = [t.detach() for t in tensors if t.is_floating_point() and t.numel()]
    (flat,) = in_memory_order(floats)
    dtype = reduce(torch.promote_types, (t.dtype for t in flat))
    ends = [end.to(flat[0].device, dtype) for t in flat for end in torch.aminmax(t)]
    return torch.stack(ends).isfinite().all()


def sendable(upload: Upload, limit: float) -> Tensor:
    """Which clients sent only numbers that the server can aggregate, bool ``[K]``; ``limit`` as in
    :func:`finite_clients`.
    """
    sent = (upload.delta, *upload.extra.values())
    return torch.stack([finite_clients(tensors, limit) for tensors in sent]).all(0)


def too_large(upload: Upload, limit: float) -> dict[str, float]:
    """The tensors in which a client sends numbers of ``limit`` or more, and the largest of each."""
    found = {}
    for tensors in (upload.delta, *upload.extra.values()):
        for name, t in tensors.items():
            if t.dtype is torch.float64 or not t.is_floating_point() or not t.numel():
                continue
            largest = float(t.abs().nan_to_num(nan=0.0, posinf=inf).max())
            if largest >= limit:
                found[name] = largest
    return found


def refuse_misfit(upload: Upload, shapes: Mapping[str, Params]) -> None:
    """Raises MessageError for other tensors than these: ``"delta"`` and each name of ``extra`` →
    like one client's.
    """
    for name in {**shapes, **upload.extra}:
        sent = upload.delta if name == "delta" else upload.extra.get(name, {})
        refuse_other(f"an upload's {name}", sent, shapes.get(name, {}), len(upload.clients))


def refuse_other(what: str, sent: Params, known: Params, *clients: int) -> None:
    """Raises MessageError for tensors with other names, shapes or types than the known ones; names
    the first.

    With ``clients``, K, tensors have a leading axis K that the known ones lack.
    """
    expected = {name: (t.dtype, (*clients, *t.shape)) for name, t in known.items()}
    found = {name: (t.dtype, (*t.shape,)) for name, t in sent.items()}
    for name in [*known, *sorted(found.keys() - expected.keys())]:
        if found.get(name) == expected.get(name):
            continue
        is_sent = "{} {}".format(*found[name]) if name in found else "missing"
        is_known = "{} {}".format(*expected[name]) if name in expected else "unknown"
        raise MessageError(
            f"{what} is of another model or method: {name} is {is_sent}, and here it is {is_known}."
        )
