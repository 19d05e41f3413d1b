"""Streams of a GPU, on which the stacks of a round train side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gcfed.federated.batches import ClientData
from gcfed.federated.stack import cannot_stack, has_dropout

STREAMS = 8  # at most: more side by side than a GPU has work for


class Streams:
    """Where the stacks of a round train: in turn on the streams of a GPU, or on a CPU where everything runs.

    A stack trains on a stream of its own. What follows, methods' hooks and the sums of uploads, is on the stream of the
    round: there one stack comes after the other in the host's order, so that equal runs have equal numbers and what
    a method keeps of all clients is written by one of them at a time. The memory of a stream is used again by
    that stream alone, which waits for that; at the end of a round the round's stream waits for all of them.

    Args:
        device: a GPU, or a CPU, which has no streams.
        number: of streams; a single one is not that of everything else, which no graph can be recorded on.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(number)] if device.type == "cuda" else []
        self._own: torch.cuda.Stream | None = None  # of the round
        self._turn = 0

    @contextmanager
    def round(self) -> Iterator[None]:
        """Around the stacks of a round: they wait for what came before, what comes after waits for them."""
        if not self._streams:
            yield
            return
        self._own, self._turn = torch.cuda.current_stream(), 0
        for stream in self._streams:
            stream.wait_stream(self._own)
        try:
            yield
        finally:
            for stream in self._streams:
                self._own.wait_stream(stream)
            self._own = None

    def stack(self) -> AbstractContextManager:
        """Around a stack: the next stream."""
        if not self._streams:
            return nullcontext()
        self._turn += 1
        return torch.cuda.stream(self._streams[self._turn % len(self._streams)])

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Within :meth:`stack`, around what follows local training; does nothing outside of a round."""
        if self._own is None:
            yield
            return
        trained = torch.cuda.current_stream()
        self._own.wait_stream(trained)
        with torch.cuda.stream(self._own):
            yield
        trained.wait_stream(self._own)


def layout(
    stack: int | str, batch_size: int, cohort: int, net: nn.Module, device: torch.device, data: ClientData
) -> tuple[int, int]:
    """K, the clients of a stack (``client.stack``), and the number of streams on which stacks train side by side.

    On a GPU, on which network and data lie by now, networks with convolutions, which are slow in a stack, and those
    with dropout train one client at a time. Networks that draw numbers (dropout, or what a network that is not ours
    may do) train on one stream, since there is one generator.
    """
    if device.type != "cuda":
        return (1 if stack == "auto" else min(int(stack), cohort)), 1
    # A client takes its weights, gradients, momentum and a method's terms, and the activations of a batch twice.
    sample = data.fetch(torch.zeros(1, dtype=torch.int64, device=device), None)[0]
    client = 16 * sum(p.nbytes for p in net.parameters()) + 2 * batch_size * activation_bytes(net, sample)
    fit = max(1, min(cohort, torch.cuda.mem_get_info(device)[0] // client))
    # A stack's dropout depends on who is in it, and so would the run on the memory that is free.
    alone = cannot_stack(net) or has_dropout(net) or any(isinstance(m, nn.modules.conv._ConvNd) for m in net.modules())
    k = (1 if alone else fit) if stack == "auto" else min(int(stack), cohort)
    draws = has_dropout(net) or not type(net).__module__.startswith("gcfed.")
    return k, 1 if draws else max(1, min(-(-cohort // k), fit // k, STREAMS))


def activation_bytes(net: nn.Module, sample: Tensor) -> int:
    """Bytes of what the layers of a network return for one sample, ``[1, *input]``."""
    returned: list[int] = []

    def count(layer: nn.Module, inputs: object, output: object) -> None:
        returned.extend(t.nbytes for t in tree_leaves(output) if isinstance(t, Tensor))

    hooks = [layer.register_forward_hook(count) for layer in net.modules() if not list(layer.children())]
    training = net.training
    try:
        with torch.no_grad():
            net.eval()(sample)
    finally:
        net.train(training)
        for hook in hooks:
            hook.remove()
    return sum(returned)
