"""Local drift decoupling and correction: FedDC (Gao et al., CVPR 2022, eqs. 4 to 7).

Client k trains on ``L_k(θ) + α/2 ‖θ + h_k − w‖² + ⟨θ, c − c_k⟩`` and then keeps

- its drift, ``h_k ← h_k + (θ_k − w)`` (eq. 6), and
- its last update as a gradient, ``c_k ← −(θ_k − w) / (η τ_k)``, which is −g_k/(ηK) in the paper; c is the mean c_k.

The server's next model is ``w ← mean_cohort θ_k + mean_all h_k`` (eq. 7): the drifts are those of all N clients, since
the ones of a cohort do not cancel out; the authors' code agrees. Clients with unequal numbers of local steps: each has
its own τ_k, and c is a mean of gradients, not of displacements.

State: h_k and c_k on the clients; c and mean h on the server (mean h follows from the updates alone). Bytes: down the
model and c, up the update and the change of c_k, so twice those of the model both ways.
"""

import torch

from gcfed.federated.aggregate import Upload
from gcfed.federated.method import FederatedMethod, Setup
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack, Params, per_client
from gcfed.methods.requirements import exact_store, full_uploads, local_sgd, plain_server, uniform_mean
from gcfed.utils.device import on_device
from gcfed.utils.number import choice, number


class FedDC(FederatedMethod):
    """Pulls each client towards w − h_k, corrects its gradient by c − c_k, and adds the mean drift to the model.

    Args:
        alpha: α ≥ 0. The paper's and its code's 0.01 on CIFAR-10 and CIFAR-100; 0.1 on MNIST.
        correction: what c_k is: ``update``, the paper's last update alone; or ``control``, the authors' code, which
            takes the correction out of it again, ``c_k ← c_k − c − (θ_k − w) / (η τ_k)``, as SCAFFOLD does. Both lead
            to the same optimum. The second does so faster: the first undoes in one round what it did in the last.

    Raises:
        ValueError: α is negative or ``correction`` unknown; at ``validate``, clients that do not run SGD without
            momentum, an aggregator that is not the uniform mean, a server that is not plain, or quantized uploads.
    """

    graphable = True
    corrects_drift = True

    def __init__(self, alpha: float = 0.01, *, correction: str = "update") -> None:
        self.alpha = number("methods.feddc.alpha", alpha, 0)
        self.correction = choice("methods.feddc.correction", correction, ("update", "control"))
        self._drift: Params = {}
        self._own: Params = {}
        self._pull: Params = {}

    def validate(self, setup: Setup) -> None:
        local_sgd(
            setup, "FedDC", "it reads a client's mean gradient off w − θ_k and counts plain steps", momentum=False
        )
        uniform_mean(setup, "FedDC", "the server follows the mean drift through the plain mean of the updates")
        plain_server(setup, "FedDC", "it sets the model itself, to the mean of the clients' plus the mean drift")
        full_uploads(setup, "FedDC", "its gradient corrections would still travel in full")
        self.names = [name for name, p in setup.module.net.named_parameters() if p.requires_grad]
        self.drifts, self.controls = setup.stores.open("feddc_drift"), setup.stores.open("feddc_control")
        exact_store(self.drifts, "FedDC")

    def on_broadcast(self, round: Round) -> None:
        self.control = self.server_state("c", {name: round.start[name] for name in self.names})
        round.send(self.control)

    def uploads(self, round: Round) -> dict[str, Params]:
        return {"feddc": self.control}

    def on_clients_start(self, stack: ClientStack, round: Round) -> None:
        """The constant part α (h_k − w) + c − c_k of each client's extra gradient, ``[K, *shape]``."""
        self._drift = self.drifts.read(stack.clients, self.control)
        self._own = self.controls.read(stack.clients, self.control)
        pull = torch._foreach_sub(list(self._drift.values()), [stack.start[name] for name in self.names])
        torch._foreach_mul_(pull, self.alpha)
        torch._foreach_add_(pull, list(self.control.values()))
        torch._foreach_sub_(pull, list(self._own.values()))
        self._pull = dict(zip(self.names, pull, strict=True))

    def on_after_backward(self, trainer, pl_module) -> None:  # type: ignore[no-untyped-def]
        stack = pl_module.clients
        names, grads = zip(*stack.named_grads(), strict=True)
        with torch.no_grad():
            torch._foreach_add_(list(grads), [self._pull[name][: stack.active] for name in names])
            torch._foreach_add_(list(grads), [stack.leaves[name] for name in names], alpha=self.alpha)

    def on_clients_end(self, stack: ClientStack, round: Round) -> None:
        self._pull = {}

    def on_upload(self, upload: Upload, round: Round) -> None:
        """Sends c_k⁺ − c_k."""
        like = upload.delta[self.names[0]]
        scale = on_device(-1 / (upload.num_steps * round.lr), like.device, like.dtype)
        kept = self.control if self.correction == "control" else self._own
        change = {}
        for name in self.names:
            delta = upload.delta[name]
            change[name] = (delta * per_client(scale, delta)).sub_(kept[name])
        upload.send("feddc", change)

    def on_receive(self, upload: Upload, round: Round) -> None:
        """Moves h_k and c_k of the clients whose upload counts, so that the server's means stay those of all."""
        for state, moves in ((self._drift, upload.delta), (self._own, upload.extra["feddc"])):
            for name, held in state.items():
                held.add_(torch.where(per_client(upload.finite, held), moves[name], 0.0))
        self.drifts.write(upload.clients, self._drift, round)
        self.controls.write(upload.clients, self._own, round)
        self._drift, self._own = {}, {}

    def on_aggregate_end(self, update: Params, round: Round) -> None:
        mean, share = [update[name] for name in self.names], round.num_finite / round.num_clients
        drift = list(self.server_state("h", self.control).values())
        torch._foreach_add_(drift, mean, alpha=share)
        torch._foreach_add_(mean, drift)
        received = [round.received["feddc"][name] for name in self.names]
        torch._foreach_add_(list(self.control.values()), received, alpha=share)
