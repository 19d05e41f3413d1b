"""A personal model beside the global one, drawn towards it: Ditto (Li et al., ICML 2021, Algorithm
1).

    local step     v ← v − η (∇F_k(v) + λ (v − w₀)),   and FedAvg's step on w

Both are on the same mini-batch. w₀ is the broadcast model. A client keeps v, with its own running
statistics; it starts at the w₀ of the client's first round, in the paper at a given v⁰. v's steps
are SGD with the clients' learning rate and weight decay. Losses of other methods count for v too;
what they add to gradients, gradient clipping and Local GC are for w only.

Which model is tested: ``test/*`` is the global model. ``personal/local_*`` (``metrics=personal``)
is each client's v after local training, on its own test split; ``personal/global_*`` is w₀ there.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gcfed.federated.parts import (
    Batch,
    ClientPart,
    ClientStack,
    ClientStates,
    Download,
    Fact,
    KeptState,
    Order,
    Params,
    Prepared,
    Setup,
)
from gcfed.methods.personal import OWN_MODELS
from gcfed.methods.requirements import local_sgd
from gcfed.utils.checked import Weight, checked


def rate(download: Download) -> Tensor:
    """η as a tensor ``[]``, because a recorded step would repeat a number."""
    return next(iter(download.broadcast_model.values())).new_full((), download.lr)


class SecondModel(ClientPart):
    """Each client keeps and trains a second model, v."""

    order = Order.MOVES_WEIGHTS
    result = OWN_MODELS
    needs = [local_sgd("its personal model makes plain steps")]
    keeps = {
        "second_model": KeptState(
            lambda part, download: download.broadcast_model, starts_at_model=True
        )
    }

    def bind(self, setup: Setup) -> None:
        self.weight_decay = setup.local_optimizer_probe.defaults["weight_decay"]

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared:
        return {"v": own["second_model"], "lr": rate(download)}

    def before_step(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> None:
        """Makes v's step: the network has v's tensors meanwhile, and then w's again."""
        stack.settle()
        w = {name: t[: stack.active].clone() for name, t in stack.full.items()}
        here = [stack.full[name][: stack.active] for name in w]
        there = [stack.prepared[self]["v"][name][: stack.active] for name in w]
        torch._foreach_copy_(here, there)
        stack.load_counters()
        grads = self.gradients(stack, objective, w)
        stack.settle()
        with torch.no_grad():
            v = list(stack.leaves.values())
            torch._foreach_add_(grads, v, alpha=self.weight_decay)
            torch._foreach_sub_(v, torch._foreach_mul(grads, stack.prepared[self]["lr"]))
        torch._foreach_copy_(there, here)
        torch._foreach_copy_(here, list(w.values()))
        stack.load_counters()

    def gradients(
        self, stack: ClientStack, objective: Callable[[], Tensor], w: Params
    ) -> list[Tensor]:
        """v's gradients, ``[n, *shape]`` each; v is in ``stack.leaves``, before
        and after the call.
        """
        raise NotImplementedError

    def on_clients_end(self, stack: ClientStack, download: Download) -> Mapping[str, Params]:
        stack.personal = dict(stack.prepared[self]["v"])
        return {"second_model": stack.personal}


@checked
class Ditto(SecondModel):
    """Trains v beside w; ``lam`` is λ, in the paper 0.1 to 2."""

    recordable = "run"
    facts = {Fact.ANCHORS}

    def __init__(self, lam: Weight = 0.1) -> None:
        self.lam = lam

    def gradients(
        self, stack: ClientStack, objective: Callable[[], Tensor], w: Params
    ) -> list[Tensor]:
        grads = list(stack.gradients(objective()).values())
        drift = [leaf.detach() - stack.broadcast_model[name] for name, leaf in stack.leaves.items()]
        torch._foreach_add_(grads, drift, alpha=self.lam)
        return grads
