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

    What a stack computes stays on its stream, its upload's part in the sums too: those wait for the stack before, so
    that they are made in the host's order and equal runs have equal numbers. The memory of a stream is used again by
    that stream alone; at the end of a round the present stream waits for all of them, before anything is freed.

    Args:
        device: a GPU, or a CPU, which has no streams.
        number: of streams; a single one is not that of everything else, which no graph can be recorded on.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(number)] if device.type == "cuda" else []
        self._last: torch.cuda.Event | None = None
        self._turn = 0

    @contextmanager
    def round(self) -> Iterator[None]:
        """Around the stacks of a round: they wait for what came before, what comes after waits for them."""
        if not self._streams:
            yield
            return
        present = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(present)
        self._last, self._turn = None, 0
        try:
            yield
        finally:
            for stream in self._streams:
                present.wait_stream(stream)

    def stack(self) -> AbstractContextManager:
        """Around the training of one stack: the next stream."""
        if not self._streams:
            return nullcontext()
        self._turn += 1
        return torch.cuda.stream(self._streams[self._turn % len(self._streams)])

    @contextmanager
    def sums(self) -> Iterator[None]:
        """Within :meth:`stack`, around what adds to the round's sums."""
        if self._streams and self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)
        yield
        if self._streams:
            self._last = torch.cuda.current_stream().record_event()


def layout(
    stack: int | str, batch_size: int, cohort: int, net: nn.Module, device: torch.device, data: ClientData
) -> tuple[int, int]:
    """K, the clients of a stack (``client.stack``), and the number of streams on which stacks train side by side.

    On a GPU, on which network and data lie by now, networks with convolutions train a client a stream, since
    stacked ones are slow; networks that draw numbers (dropout, or what a network that is not ours may do) train
    on one stream, since there is one generator.
    """
    if device.type != "cuda":
        return (1 if stack == "auto" else min(int(stack), cohort)), 1
    # A client takes its weights, gradients, momentum and a method's terms, and the activations of a batch twice.
    sample = data.fetch(torch.zeros(1, dtype=torch.int64, device=device), None)[0]
    client = 16 * sum(p.nbytes for p in net.parameters()) + 2 * batch_size * activation_bytes(net, sample)
    fit = max(1, min(cohort, torch.cuda.mem_get_info(device)[0] // client))
    alone = cannot_stack(net) or any(isinstance(m, nn.modules.conv._ConvNd) for m in net.modules())
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
