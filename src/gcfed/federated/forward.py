"""Calls a network: for more than its logits, on other tensors than its own, for one client or several side by side."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

Params = dict[str, Tensor]


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """The network in evaluation mode for a while."""
    training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(training)


class Output(NamedTuple):
    """What the clients' networks return on one batch.

    Attributes:
        logits_KBC: ``[n, B, C]``, or ``[n, B, T, C]`` where every position of a sequence has a label.
        features_KBF: the network's features (:class:`Tap`), flattened, ``[n, B, F]``; None unless tapped.
        stages: the outputs of the network's ``stages`` in order, each ``[n, B, …]``, the last being the logits; empty
            unless tapped.
    """

    logits_KBC: Tensor
    features_KBF: Tensor | None = None
    stages: tuple[Tensor, ...] = ()


class Tap:
    """Calls a network for more than its logits.

    Features are the network's ``penultimate(x)`` where it has one (VGG11's ``features`` are its convolutions), else its
    ``features(x)``; ``head`` makes the logits of them.
    """

    def __init__(self, net: nn.Module, features: bool, stages: bool) -> None:
        self.net, self.tap_features, self.tap_stages = net, features, stages

    def __call__(self, x: Tensor, first: int = 0) -> tuple[Tensor, ...]:
        """(logits, features if tapped, *stages if tapped); ``first`` enters the network at that stage."""
        if self.tap_stages:
            outputs = [x]
            for stage in list(self.net.stages().values())[first:]:  # type: ignore[operator]
                outputs.append(stage(outputs[-1]))
            tapped = [self._features(x).flatten(1)] if self.tap_features else []
            return outputs[-1], *tapped, *outputs[1:]
        if self.tap_features:
            features = self._features(x)
            return self.net.head(features), features.flatten(1)  # type: ignore[operator]
        return (self.net(x),)

    def _features(self, x: Tensor) -> Tensor:
        part = "penultimate" if hasattr(self.net, "penultimate") else "features"
        return getattr(self.net, part)(x)

    def output(self, tensors: Sequence[Tensor]) -> Output:
        features = tensors[1] if self.tap_features else None
        return Output(tensors[0], features, tuple(tensors[1 + self.tap_features :]))


class Swap:
    """Runs a network on other tensors than its own; where those sit is looked up once.

    ``torch.func.functional_call`` looks up every name on every call: 0.1 to 0.2 ms more for an MLP of six tensors,
    whose local step takes 4. A tensor shared by several modules (tied weights) is replaced in all of them.
    """

    def __init__(self, net: nn.Module) -> None:
        names = {id(t): name for name, t in [*net.named_parameters(), *net.named_buffers()]}
        self._slots: list[tuple[dict[str, Any], str, str]] = [
            (tensors, key, names[id(t)])
            for module in net.modules()
            for tensors in (module._parameters, module._buffers)
            for key, t in tensors.items()
            if t is not None
        ]

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """The network with these tensors in place of its own, by name; those without a name here stay."""
        slots = [slot for slot in self._slots if slot[2] in tensors]
        before = [module[key] for module, key, _ in slots]
        try:
            for module, key, name in slots:
                module[key] = tensors[name]
            yield
        finally:
            for (module, key, _), tensor in zip(slots, before, strict=True):
                module[key] = tensor


class Stacked:
    """How n clients enter the autograd graph: their stacked tensors do, and ``vmap`` takes the client axis off.

    Attributes:
        leaves: the trained parameters, name → ``[n, *shape]``, whose ``grad`` the solver reads.
        state: what the network is called on, name → tensor: all parameters and buffers.
    """

    def __init__(self, swap: Swap, leaves: Params, buffers: Params) -> None:
        self.swap, self.leaves, self.state = swap, leaves, leaves | buffers

    def enter(self, params: Mapping[str, Tensor]) -> Params:
        """Tensors ``[n, *shape]`` in the form of ``state``."""
        return dict(params)

    def call(self, tap: Tap, state: Params, x_KB: Tensor, first: int = 0) -> Output:
        """Each client's network on its own batch, ``[n, B, *input]``."""

        def one_client(tensors: Params, x_B: Tensor) -> tuple[Tensor, ...]:
            with self.swap.holding(tensors):
                return tap(x_B, first)

        return tap.output(vmap(one_client, randomness="different")(state, x_KB))

    def collect(self) -> None:
        """After a backward pass: brings the gradients to the leaves."""

    def gradients(self, loss: Tensor) -> Params:
        """Gradients by the leaves, name → ``[n, *shape]``; zeros where none arrives."""
        grads = torch.autograd.grad(loss, list(self.leaves.values()), materialize_grads=True)
        return dict(zip(self.leaves, grads, strict=True))


class SqueezedSingle(Stacked):
    """A single client, whose client axis is taken off inside the graph.

    For recurrent networks: cuDNN gives the weights of their layers new memory at their first sight.
    """

    def call(self, tap: Tap, state: Params, x_KB: Tensor, first: int = 0) -> Output:
        with self.swap.holding({name: t.squeeze(0) for name, t in state.items()}):
            out = tap(x_KB.squeeze(0), first)
        return tap.output([t.unsqueeze(0) for t in out])


class Single(Stacked):
    """A single client, whose tensors enter the graph without their client axis.

    Taking it off inside the graph would cost two nodes a tensor and step.
    """

    def __init__(self, swap: Swap, leaves: Params, buffers: Params) -> None:
        super().__init__(swap, leaves, {})
        inputs = {name: t[0].detach().requires_grad_() for name, t in leaves.items()}
        self.state = inputs | self.enter(buffers)
        self._pairs = list(zip(inputs.values(), leaves.values(), strict=True))

    def enter(self, params: Mapping[str, Tensor]) -> Params:
        return {name: t[0] for name, t in params.items()}

    def call(self, tap: Tap, state: Params, x_KB: Tensor, first: int = 0) -> Output:
        with self.swap.holding(state):
            out = tap(x_KB.squeeze(0), first)
        return tap.output([t.unsqueeze(0) for t in out])

    def collect(self) -> None:
        for entry, leaf in self._pairs:
            if (grad := entry.grad) is not None:
                # A term of a method may have been written on the leaves.
                leaf.grad = grad.unsqueeze(0) if leaf.grad is None else leaf.grad.add_(grad)
                entry.grad = None

    def gradients(self, loss: Tensor) -> Params:
        grads = torch.autograd.grad(loss, [t for pair in self._pairs for t in pair], allow_unused=True)
        result = {}
        for (name, leaf), by_input, by_leaf in zip(self.leaves.items(), grads[::2], grads[1::2], strict=True):
            grad = torch.zeros_like(leaf) if by_input is None else by_input.unsqueeze(0)
            result[name] = grad if by_leaf is None else grad + by_leaf
        return result
