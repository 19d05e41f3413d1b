"""Personal models by Moreau envelopes: pFedMe (Dinh, Tran and Nguyen, NeurIPS 2020, Algorithm 1).

    inner steps    θ ← θ − η_p (∇F_k(θ) + λ (θ − w)),   ``inner_steps`` times on the same mini-batch
    local step     w ← w − ηλ (w − θ)

θ starts at the broadcast model and goes on from one mini-batch to the next, as in the authors'
code. η_p is the clients' learning rate, and the paper's β is ``server.lr``. Clients send w and keep
nothing. Weight decay, GC and terms of other methods act on each inner step. ``train/loss`` is θ's.

Which model is tested: as in Ditto, with θ instead of v.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gcfed.federated.parts import (
    Batch,
    ClientStack,
    ClientStates,
    Download,
    Fact,
    Order,
    Prepared,
    Setup,
)
from gcfed.methods.objective.proximal import Proximal
from gcfed.methods.personal import OWN_MODELS
from gcfed.methods.personal.ditto import rate
from gcfed.methods.requirements import local_sgd
from gcfed.utils.checked import Count, Positive, Weight, checked
from gcfed.utils.refusal import Refusal


@checked
class PFedMe(Proximal):
    """Trains θ in the network and moves w towards it.

    Args:
        lam: λ, how strongly θ is drawn towards w. The paper: 15.
        lr: η of w. The paper: 0.005.
        inner_steps: K. The paper: 5.
    """

    recordable = "run"
    order = Order.MOVES_WEIGHTS
    result = OWN_MODELS
    facts = {Fact.CORRECTS_DRIFT}  # Δ is no sum of gradients
    needs = [local_sgd("its inner steps are plain")]

    def __init__(self, lam: Weight = 15.0, *, lr: Positive = 0.005, inner_steps: Count = 5) -> None:
        super().__init__(lam)  # around w
        self.rate = lr * lam
        self.inner_steps = inner_steps

    def validate(self, setup: Setup) -> None:
        if setup.solver.clip_norm is not None:
            raise Refusal(
                f"{self.title} needs client.clip_norm=null, which would bound one inner step of"
                " each K."
            )

    def bind(self, setup: Setup) -> None:
        self.module = setup.module
        self.weight_decay = setup.local_optimizer_probe.defaults["weight_decay"]

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared:
        self.after_backward = self.module.after_backward()
        w = {name: stack.full[name].clone() for name in self.trained_names}
        return {"anchor": w, "lr": rate(download)}

    def before_step(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> None:
        """Makes the last batch's step of w, and all inner steps but the last, which is the engine's
        step.
        """
        self.move(stack, stack.active)
        for _ in range(self.inner_steps - 1):
            torch.clear_autocast_cache()  # it has older weights
            stack.backward(objective())
            if self.after_backward is not None:
                self.after_backward()
            with torch.no_grad():
                grads, theta = stack.with_grads(stack.leaves)
                torch._foreach_add_(grads, theta, alpha=self.weight_decay)
                torch._foreach_sub_(theta, torch._foreach_mul(grads, stack.prepared[self]["lr"]))
            stack.drop_grads()

    def move(self, stack: ClientStack, n: int) -> None:
        """The step of w, of the first n clients.

        It does nothing before the first batch, where θ = w.
        """
        for name, w in stack.prepared[self]["anchor"].items():
            w[:n].lerp_(stack.full[name][:n], self.rate)

    def on_clients_end(self, stack: ClientStack, download: Download) -> None:
        self.move(stack, len(stack))
        for name, w in stack.prepared[self]["anchor"].items():
            stack.personal[name] = stack.full[name].clone()
            stack.full[name].copy_(w)
