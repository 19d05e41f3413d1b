"""Calls a network with given tensors, and returns its features and stages in addition to its logits."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call

Params = dict[str, Tensor]


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Puts the network into evaluation mode in the block."""
    training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(training)


def hand_copies(net: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook for networks that change their input: copies the input, so that the batch stays the same."""
    return tuple(t.clone() if isinstance(t, Tensor) else t for t in inputs)


class Output(NamedTuple):
    """What the clients' networks return for a batch.

    Attributes:
        logits_KBC: ``[n, B, C]``, or ``[n, B, T, C]`` if every position of a sequence has a label.
        features_KBF: the flattened features (:class:`Tap`), ``[n, B, F]``; None unless tapped.
        stages: the outputs of ``net.stages()`` in order, ``[n, B, …]``; the last are the logits. Empty unless tapped.
    """

    logits_KBC: Tensor
    features_KBF: Tensor | None = None
    stages: tuple[Tensor, ...] = ()


def _places(net: nn.Module) -> dict[str, str]:
    """Where modules keep tensors → the name of the tensor, one of its places. A module with two names counts once,
    because ``functional_call`` would not give it its tensors back.
    """
    names: dict[Tensor, str] = {}
    kept = ((prefix, own) for prefix, m in net.named_modules() for own in (m._parameters, m._buffers))
    places = [(f"{prefix}.{key}".lstrip("."), t) for prefix, own in kept for key, t in own.items() if t is not None]
    return {place: names.setdefault(t, place) for place, t in places}


class Tap(nn.Module):
    """Calls a network, and also returns its features or the outputs of its stages.

    Features are ``net.penultimate(x)`` if it exists (VGG11's ``features`` are its convolutions), else
    ``net.features(x)``. ``net.head`` turns them into logits.
    """

    def __init__(self, net: nn.Module, features: bool, stages: bool) -> None:
        super().__init__()
        self.net, self.tap_features, self.tap_stages = net, features, stages

    def forward(self, x: Tensor, first: int = 0) -> tuple[Tensor, ...]:
        """(logits, features if tapped, *stages if tapped). With ``first``, x is the input of that stage."""
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

    def on(self, state: Mapping[str, Tensor], x: Tensor, first: int = 0) -> tuple[tuple[Tensor, ...], Params]:
        """The same with these tensors in place of the network's own, by name. Also returns the tensors that the network
        has put in their place (``self.mean = …``).
        """
        given = {f"net.{place}": state[name] for place, name in _places(self.net).items() if name in state}
        out = functional_call(self, given, (x, first), tie_weights=False)
        return out, {name: t for name in state if (t := given[f"net.{name}"]) is not state[name]}

    def _features(self, x: Tensor) -> Tensor:
        part = "penultimate" if hasattr(self.net, "penultimate") else "features"
        copies = hand_copies in self.net._forward_pre_hooks.values()  # this call bypasses hooks
        return getattr(self.net, part)(x.clone() if copies else x)

    def output(self, tensors: Sequence[Tensor]) -> Output:
        features = tensors[1] if self.tap_features else None
        return Output(tensors[0], features, tuple(tensors[1 + self.tap_features :]))
