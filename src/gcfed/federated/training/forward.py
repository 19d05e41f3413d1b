"""Calls a network with given tensors, and returns its features and stages in addition to its
logits.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from gcfed.models.unchanged import hand_copies

Params = dict[str, Tensor]


class Output(NamedTuple):
    """What the clients' networks return for a batch.

    Attributes:
        logits_KBC: ``[n, B, C]``, or ``[n, B, T, C]`` if every position of a sequence has a label.
        features_KBF: the flattened features (:class:`Tap`), ``[n, B, F]``; None unless tapped.
        stages: the outputs of ``net.stages()`` in order, ``[n, B, …]``; the last are the logits.
            Empty unless tapped.
    """

    logits_KBC: Tensor
    features_KBF: Tensor | None = None
    stages: tuple[Tensor, ...] = ()


def slots(net: nn.Module) -> list[tuple[dict[str, Any], str, str]]:
    """Where the modules keep tensors: the dictionary, its key, and the tensor's name, one of its
    places.
    """
    names = {id(t): name for name, t in (*net.named_parameters(), *net.named_buffers())}
    kept = [own for module in net.modules() for own in (module._parameters, module._buffers)]
    return [(own, key, names[id(t)]) for own in kept for key, t in own.items() if t is not None]


class Tap:
    """Calls a network, and also returns its features or the outputs of its stages.

    Features are ``net.penultimate(x)`` if it exists, else ``net.features(x)``. ``net.head`` turns
    them into logits.
    """

    def __init__(self, net: nn.Module, features: bool, stages: bool) -> None:
        self.net, self.tap_features, self.tap_stages = net, features, stages

    def __call__(self, x: Tensor, first: int = 0) -> tuple[Tensor, ...]:
        """(logits, features if tapped, *stages if tapped).

        With ``first``, x is the input of that stage.
        """
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

    def on(
        self, state: Mapping[str, Tensor], x: Tensor, first: int = 0
    ) -> tuple[tuple[Tensor, ...], Params]:
        """The same on these tensors, by name.

        Also returns those that forward has put in their place.
        """
        places = [(own, key, name, own[key]) for own, key, name in slots(self.net) if name in state]
        # integers travel as floats
        given = {name: state[name].to(own.dtype) for _, _, name, own in places}
        try:
            for tensors, key, name, _ in places:
                tensors[key] = given[name]
            out = self(x, first)
            return out, {
                name: tensors[key]
                for tensors, key, name, _ in places
                if tensors[key] is not given[name]
            }
        finally:
            for tensors, key, _, own in places:
                tensors[key] = own

    def _features(self, x: Tensor) -> Tensor:
        part = "penultimate" if hasattr(self.net, "penultimate") else "features"
        copies = hand_copies in self.net._forward_pre_hooks.values()  # this call bypasses hooks
        return getattr(self.net, part)(x.clone() if copies else x)

    def output(self, tensors: Sequence[Tensor]) -> Output:
        features = tensors[1] if self.tap_features else None
        return Output(tensors[0], features, tuple(tensors[1 + self.tap_features :]))
