"""Streaming aggregation of client updates: memory does not grow with the cohort.

Sums of float32 tensors come out the same, bit for bit, in whatever order and wherever their terms are added.
Each term is cut at fixed places: into a multiple of 2⁻¹⁶ and a rest in multiples of 2⁻⁵⁴ (the pre-rounding of Demmel
and Nguyen, "Fast reproducible floating-point summation", ARITH 2013, with fixed bins). The sums of the parts are kept
in float64 and round nothing, so they know no order, as long as terms stay below 64 and whole weights add up to less
than 2¹⁵. Beyond that they are as good as any in float64, but order may show in a last bit. Of a term what lies below
2⁻⁵⁵ is lost: no update misses it, but FedCurv's squared gradients would, at 10⁻¹³. With a third part, in multiples of
2⁻⁹², numbers keep all their digits down to 10⁻²⁰.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from gcfed.federated.forward import Params
from gcfed.federated.messages import Upload
from gcfed.federated.round import Round
from gcfed.federated.stack import per_client
from gcfed.utils.checked import checked
from gcfed.utils.device import on_device

PLACES = (16, 54, 92)
PIECE = 1 << 18  # entries at a time, whose copies stay in a core's cache


class Aggregator(Protocol):
    """Turns the uploads of one round into one update; ``add`` streams, ``reduce`` ends the round on every process.
    What lasts longer than a round is a method's (``server_state``).

    ``beside`` makes one for what clients send beside Δ; ``validate`` meets the run's ``Setup`` before the first
    round, and refuses a cohort that is too small.
    """

    def validate(self, setup: Any) -> None: ...
    def beside(self) -> Aggregator: ...
    def add(self, upload: Upload, round: Round) -> None: ...
    def reduce(self, round: Round, like: Params) -> Params: ...


@checked
class MeanAggregator:
    """Weighted mean of the finite updates: ``Δ = Σ_k p_k Δ_k / Σ_k p_k`` (McMahan et al. 2017, Algorithm 1).

    In float32 it does not depend on which process trained whom, nor on the order, unless ``exact`` is false: then
    terms are added in float64 as they come.

    Args:
        weighting: ``"uniform"`` is p_k = 1, GC-Fed's Algorithm 1, line 19; ``"samples"`` is p_k = n_k, FedAvg's own.
        exact: whether the sum knows no order; 1.5 ms of a round of 40 on the digits (docs/performance.md).
    """

    def __init__(self, weighting: Literal["uniform", "samples"] = "uniform", exact: bool = True) -> None:
        self.weighting, self.exact = weighting, exact
        self._bins = 2 if self.exact else 1
        self._sums: dict[str, ExactSum] = {}
        self._joint: dict[str, dict[str, torch.Size]] = {}  # by name of a sum, the tensors that are joined in it
        self._weight: Tensor | None = None

    def validate(self, setup: Any) -> None: ...

    def beside(self) -> MeanAggregator:
        """The plain mean, whatever the weights of the updates, also of numbers that are much smaller."""
        mean = MeanAggregator(exact=self.exact)
        mean._bins = 3 if self.exact else 1
        return mean

    def add(self, upload: Upload, round: Round) -> None:
        """Takes in the updates of K clients; one with a number that is not finite counts for nothing."""
        weight = upload.finite.to(torch.float32)
        if self.weighting == "samples":
            weight = weight * on_device(upload.num_samples, weight.device)
        weight = weight.double()
        self._weight = weight.sum() if self._weight is None else self._weight + weight.sum()
        for name, value in self._joined(upload.delta).items():
            if name not in self._sums:
                self._sums[name] = ExactSum(value[0], self._bins)
            self._sums[name].add(value, weight)

    def reduce(self, round: Round, like: Params | None = None) -> Params:
        """The mean over the cohort, name → ``[*shape]`` of ``like``, by default the model's; zeros where no client was
        finite. A process that trained no client of this cohort knows the shapes from ``like`` alone.
        """
        like = like or round.start
        self._part()
        sums = {name: self._sums.get(name) or ExactSum(t, self._bins) for name, t in like.items()}
        nothing = next(iter(like.values())).new_zeros((), dtype=torch.float64)
        weight = nothing if self._weight is None else self._weight
        self._sums, self._weight = {}, None
        update = dict(zip(sums, means(list(sums.values()), round, weight), strict=True))
        for name, mean in update.items():
            if mean.stride() != like[name].stride():  # joined tensors have lost the model's memory format
                update[name] = torch.empty_like(like[name], dtype=mean.dtype).copy_(mean)
        return update

    def _joined(self, delta: Params) -> Params:
        """On a GPU the small tensors of a type as one, ``[K, Σd]``: a sum has a dozen kernels, however small."""
        small = {name: t for name, t in delta.items() if joins(t.device) and t[0].numel() <= PIECE}
        joined = {name: t for name, t in delta.items() if name not in small}
        for dtype in dict.fromkeys(t.dtype for t in small.values()):
            alike = {name: t for name, t in small.items() if t.dtype == dtype}
            self._joint[str(dtype)] = {name: t.shape[1:] for name, t in alike.items()}
            joined[str(dtype)] = torch.cat([t.reshape(len(t), -1) for t in alike.values()], 1)
        return joined

    def _part(self) -> None:
        """The sums of joined tensors, tensor by tensor."""
        for joint, shapes in self._joint.items():
            whole, sizes = self._sums.pop(joint), [shape.numel() for shape in shapes.values()]
            for (name, shape), *pieces in zip(shapes.items(), *(p.split(sizes) for p in whole.parts), strict=True):
                self._sums[name] = own = copy(whole)
                own.parts = [piece.view(shape) for piece in pieces]
        self._joint = {}


def joins(device: torch.device) -> bool:
    """Whether tensors are joined there; on a CPU, where a call costs little, the copy would cost more."""
    return device.type == "cuda"


class ExactSum:
    """The weighted sum over clients of one tensor.

    Args:
        like: gives shape, type and device.
        bins: parts of a term, 2 or 3; 1, and always of a float64 tensor: a plain sum.

    Attributes:
        parts: what processes add up, in float64, ``[*shape]`` each.
    """

    def __init__(self, like: Tensor, bins: int = 2) -> None:
        self.dtype = like.dtype
        bins = 1 if like.dtype is torch.float64 else bins
        self.parts = [torch.zeros_like(like, dtype=torch.float64) for _ in range(bins)]

    def add(self, values_K: Tensor, weight_K: Tensor) -> None:
        """Adds ``Σ_k weight_k values_k``, of ``[K, *shape]`` and float64 ``[K]``; a zero weight keeps even an infinite
        value out.
        """
        if weight_K.device.type == "cpu":
            self._add_each(values_K, weight_K)
        else:  # where reading a weight would wait for the device
            self._add_together(values_K, weight_K)

    def _add_each(self, values_K: Tensor, weight_K: Tensor) -> None:
        for values, weight in zip(values_K, weight_K.tolist(), strict=True):
            for piece, *totals in _pieces(values, self.parts) if weight else ():
                for total, part in zip(totals, self._cut(piece), strict=True):
                    total.add_(part, alpha=weight)

    def _add_together(self, values_K: Tensor, weight_K: Tensor) -> None:
        weight = per_client(weight_K, values_K)
        for total, part_K in zip(self.parts, self._cut(torch.where(weight > 0, values_K, 0.0)), strict=True):
            total.add_((part_K * weight).sum(0))

    def _cut(self, values: Tensor) -> Iterator[Tensor]:
        """The parts of values one after the other, in the same memory."""
        *upper, last = PLACES[: len(self.parts)]
        if not upper:
            yield values
            return
        # With m digits behind the point, (x + 1.5·2^(m−b)) − 1.5·2^(m−b) is x rounded to a multiple of 2^−b. Float32
        # loses a digit of a rest just below a power of two, which a third part would have to carry.
        rest, m = (values.double(), 52) if len(upper) > 1 else (values, 23)
        for b in upper:
            part = torch.add(rest, 1.5 * 2.0 ** (m - b)).sub_(1.5 * 2.0 ** (m - b))
            yield part
            rest = torch.sub(rest, part, out=part)
        yield rest.add_(1.5 * 2.0 ** (m - last)).sub_(1.5 * 2.0 ** (m - last))


def means(sums: Sequence[ExactSum], round: Round, weight: Tensor | None = None) -> list[Tensor]:
    """The sums of all processes over that of their weights, or over 1 where that is 0, in the type of their terms.

    Args:
        sums: alike on all processes; spent.
        weight: of this process's terms, one float64 number; none for plain sums.
    """
    weight = torch.zeros((), dtype=torch.float64, device=sums[0].parts[0].device) if weight is None else weight
    results: dict[int, Tensor] = {}
    for kind in dict.fromkeys((len(s.parts), s.dtype) for s in sums):
        places = [i for i, s in enumerate(sums) if (len(s.parts), s.dtype) == kind]
        finish = partial(_over, kind[1])
        results |= zip(places, round.finish([sums[i].parts for i in places], finish, weight), strict=True)
    return [results[i] for i in range(len(sums))]


def _over(dtype: torch.dtype, weight: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
    """Adds up parts, the smallest first, in the memory of the last, and divides by this weight."""
    divisor = torch.where(weight > 0, weight, 1.0)

    def over(parts: Sequence[Tensor]) -> Tensor:
        *rest, total = parts
        for part in reversed(rest):
            total.add_(part)
        return total.div_(divisor).to(dtype)

    return over


def _pieces(values: Tensor, sums: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """All cut alike along the first axis."""
    if values.numel() <= PIECE:
        return iter([(values, *sums)])
    rows = max(1, PIECE * len(values) // values.numel())
    return zip(*(t.split(rows) for t in (values, *sums)), strict=True)
