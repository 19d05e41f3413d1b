"""Calls a network with given tensors, and returns its features and stages in addition to its
logits.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gcfed.federated.protocol.messages import Params
from gcfed.models.unchanged import hand_copies


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


class Slot(NamedTuple):
    """A place where a module keeps a tensor. Tied tensors have several slots and one name."""

    home: dict[str, Any]  # a module's parameters or buffers
    key: str
    name: str
    # the row of an embedding that stands for padding; the module gives it no gradient
    padding: int | None = None

    @property
    def tensor(self) -> Tensor:
        kept: Tensor = self.home[self.key]
        return kept

    def put(self, tensor: Tensor) -> None:
        self.home[self.key] = tensor

    def without_padding(self, tensor: Tensor) -> Tensor:
        """The tensor, where the row of the padding has no gradient. The module's own rule for it
        does not work in ``torch.func.vmap``.
        """
        if self.padding is None:
            return tensor
        is_padding = torch.arange(len(tensor), device=tensor.device) == self.padding
        return torch.where(is_padding.unsqueeze(-1), tensor.detach(), tensor)


def slots(net: nn.Module) -> list[Slot]:
    """All places where the modules of a network keep parameters and dense buffers."""
    names = {id(t): name for name, t in (*net.named_parameters(), *dense_buffers(net).items())}
    found = []
    for module in net.modules():
        for home in (module._parameters, module._buffers):
            for key, t in home.items():
                if id(t) in names:
                    padding = module.padding_idx if isinstance(module, nn.Embedding) else None
                    found.append(Slot(home, key, names[id(t)], padding))
    return found


def dense_buffers(net: nn.Module) -> Params:
    """The buffers by name, without sparse ones, which are constants."""
    return {name: t for name, t in net.named_buffers() if t.layout == torch.strided}


class Tap:
    """Calls a network, and also returns its features or the outputs of its stages.

    Features are ``net.penultimate(x)`` if it exists, else ``net.features(x)``. ``net.head`` turns
    them into logits.
    """

    def __init__(self, net: nn.Module, features: bool = False, stages: bool = False) -> None:
        self.net = net
        self.tap_features = features
        self.tap_stages = stages

    def __call__(self, x: Tensor, first: int = 0) -> tuple[Tensor, ...]:
        """Returns (logits, features if tapped, *stages if tapped).

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
        """Calls the network on these tensors, by name.

        Returns the outputs, and the tensors that forward has put in the place of these.
        """
        used = [slot for slot in slots(self.net) if slot.name in state]
        before = [slot.tensor for slot in used]
        # Integers travel as floats.
        tensors = {
            slot.name: state[slot.name].to(t.dtype) for slot, t in zip(used, before, strict=True)
        }
        given = [slot.without_padding(tensors[slot.name]) for slot in used]
        try:
            for slot, t in zip(used, given, strict=True):
                slot.put(t)
            outputs = self(x, first)
            assigned = {}
            for slot, t in zip(used, given, strict=True):
                if slot.tensor is not t:
                    assigned[slot.name] = slot.tensor
            return outputs, assigned
        finally:
            for slot, t in zip(used, before, strict=True):
                slot.put(t)

    def _features(self, x: Tensor) -> Tensor:
        net: Any = self.net
        layers = net.penultimate if hasattr(net, "penultimate") else net.features
        if hand_copies in self.net._forward_pre_hooks.values():  # this call bypasses hooks
            x = x.clone()
        features: Tensor = layers(x)
        return features

    def output(self, tensors: Sequence[Tensor]) -> Output:
        features = tensors[1] if self.tap_features else None
        return Output(tensors[0], features, tuple(tensors[1 + self.tap_features :]))
