"""The memory of K clients."""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from gcfed.federated.network.lent_network import LentNetwork
from gcfed.federated.network.rows import empty_rows
from gcfed.federated.protocol.messages import Params


class ClientTensors:
    """The tensors of K clients. They keep their memory while clients train, one after another.

    Args:
        lent_network: the network.
        broadcast_model: the model from which the clients train, name → ``[*shape]``.

    Attributes:
        network: the network's own tensors, by name.
        trained: names of the trained parameters.
        full: the tensors that travel, name → ``[K, *shape]``; integers as floats.
        buffers: the buffers that forward passes update, name → ``[K, *shape]``: those of ``full``,
            the integers for which ``full`` has floats, and those that no checkpoint has.
    """

    def __init__(
        self, lent_network: LentNetwork, broadcast_model: Mapping[str, Tensor], k: int
    ) -> None:
        self.network = lent_network.tensors
        self.trained = [name for name, t in self.network.items() if t.requires_grad]
        self.full: Params = {name: empty_rows(t, k) for name, t in broadcast_model.items()}
        self.buffers: Params = {}
        for name, t in self.full.items():
            if name not in self.trained:
                self.buffers[name] = t
        # Buffers that no checkpoint has begin each round with the network's values.
        self._unsaved: Params = {}
        for name, t in self.network.items():
            is_parameter = isinstance(t, nn.Parameter)
            if name not in broadcast_model and name not in lent_network.saved and not is_parameter:
                self._unsaved[name] = t.data
                self.buffers[name] = empty_rows(t, k)
        # integers that forward passes count, and their floats
        self._counters: list[tuple[Tensor, Tensor]] = []
        for name in broadcast_model:
            if not self.network[name].is_floating_point():
                self.buffers[name] = empty_rows(self.network[name], k)
                self._counters.append((self.buffers[name], self.full[name]))

    def load(self, broadcast_model: Mapping[str, Tensor]) -> None:
        """All clients begin at this model. The network must have its own tensors."""
        torch._foreach_copy_(
            [self.full[name] for name in broadcast_model], list(broadcast_model.values())
        )
        for name, t in self._unsaved.items():
            self.buffers[name].copy_(t)
        self.load_counters()

    def load_counters(self) -> None:
        """Copies floats of ``full`` into the integers that they stand for."""
        for counter, t in self._counters:
            counter.copy_(t)

    def save_counters(self) -> None:
        """Copies the integers into the floats of ``full`` that stand for them."""
        for counter, t in self._counters:
            t.copy_(counter)

    def teacher(self, broadcast_model: Mapping[str, Tensor]) -> Params:
        """The broadcast model, and what the network needs in addition to it."""
        return self._unsaved | dict(broadcast_model)

    @cached_property
    def first(self) -> Params:
        """The first client's tensors, ``[*shape]``, in this memory."""
        return {name: t[0] for name, t in {**self.full, **self.buffers}.items()}
