"""Finds state that a network or a task keeps from one call to the next, outside its buffers."""

import logging

from torch import Tensor

from gcfed.federated.network.probing.closeness import is_close
from gcfed.federated.network.probing.passes import Pass, Passes
from gcfed.federated.network.probing.untrainable import few
from gcfed.federated.protocol.messages import Params
from gcfed.models.snapshot import GENERATORS
from gcfed.models.unchanged import attributes
from gcfed.utils.rng import seed_generators

log = logging.getLogger(__name__)
IN_TURN = "clients share it, in the order in which they train"
ANEW = "each of several clients begins each round with its first value"


class HiddenState:
    """Repeats passes after other passes. It must be made before the first pass.

    Attributes:
        restorable: whether it found state in attributes that the engine can set back.
    """

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.restorable = False
        self._marks = {name: mark for name, (_, mark) in attributes(passes.net).items()}

    def in_network(self, first: Pass, test: Pass, trained: Params) -> str:
        """Repeats a pass in training and one in evaluation mode, with the same tensors and seeds,
        in a network that has first seen other samples. Warns of anything that earlier passes
        changed.

        Args:
            first: the first pass, in training mode.
            test: the pass in evaluation mode, on the tensors ``trained``.

        Returns:
            Why clients cannot train in one stack; empty if they can.
        """
        passes = self.passes
        passes.begin_anew()
        passes.run(passes.others)
        again = passes.run(passes.x)
        tested = passes.run(passes.x, training=False, start=trained)
        same = is_close(again.out, first.out) and is_close(tested.out, test.out)
        changed = self._changed_attributes(ignore_features=same)
        if same and not changed:
            return ""
        passes.begin_anew()
        self.restorable = is_close(passes.run(passes.x).out, first.out)
        where = "an attribute, a generator or a global"
        if changed:
            where = f"the attributes {few(changed)}"
        log.warning(
            "%s keeps something from one call to the next in %s: %s, and no checkpoint has it."
            " Make it a buffer (register_buffer), and draw from torch's global generator.",
            passes.name,
            where,
            ANEW if self.restorable else IN_TURN,
        )
        return "" if same else "state in plain attributes"

    def _changed_attributes(self, ignore_features: bool) -> list[str]:
        """Names of attributes that passes have changed.

        Args:
            ignore_features: whether tensors and generators do not count. Many networks keep their
                last features, which no later pass reads.
        """
        changed = []
        for name, (value, mark) in attributes(self.passes.net).items():
            if ignore_features and isinstance(value, (Tensor, *GENERATORS)):
                continue
            if self._marks.get(name, mark) != mark:
                changed.append(name)
        return changed

    def in_task(self, first: Pass) -> str:
        """Computes the loss of a batch again, after that of another batch. Warns if it differs.

        Returns:
            Why clients cannot train in one stack; empty if they can.
        """
        passes = self.passes
        passes.begin_anew()
        loss = self._loss_of(first.out)
        self._loss_of(first.out.flip(0) * 1.1)
        if is_close(self._loss_of(first.out), loss):
            return ""
        passes.begin_anew()
        begins_anew = is_close(self._loss_of(first.out), loss)
        if begins_anew:
            self.restorable = True
        name = f"task={type(passes.task).__name__}"
        log.warning(
            "%s keeps something from one call to the next: %s, and no checkpoint has it.",
            name,
            ANEW if begins_anew else "clients and tests share it, in the order in which they come",
        )
        return f"state in its {name}"

    def _loss_of(self, out: Tensor) -> Tensor:
        """The loss of outputs ``[B, …]``, always with the same random numbers."""
        passes = self.passes
        seed_generators(out.device, 0)
        labels = passes.y
        out = out.clone().unsqueeze(0)
        return passes.next_loss(out, passes.x, labels.unsqueeze(0), [len(labels)]).detach()
