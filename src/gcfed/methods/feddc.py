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
from lightning.pytorch import LightningModule, Trainer

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Upload
from gcfed.federated.method import ClientPart, Method, ServerPart, Setup
from gcfed.federated.round import Round
from gcfed.federated.stack import ClientStack, per_client
from gcfed.methods.requirements import exact_store, full_uploads, local_sgd, plain_server, uniform_mean
from gcfed.utils.device import on_device
from gcfed.utils.number import choice, number


class FedDC(Method):
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

    def __init__(self, alpha: float = 0.01, *, correction: str = "update") -> None:
        choice("methods.feddc.correction", correction, ("update", "control"))
        drift = LocalDrift(number("methods.feddc.alpha", alpha, 0), takes_out=correction == "control")
        super().__init__(drift, MeanDrift())


class LocalDrift(ClientPart):
    """What clients do: pull towards w − h_k, correct by c − c_k, and keep h_k and c_k."""

    graphable = True
    corrects_drift = True

    def __init__(self, alpha: float, takes_out: bool) -> None:
        self.alpha, self.takes_out = alpha, takes_out
        self._drift: Params = {}
        self._own: Params = {}
        self._pull: Params = {}

    def validate(self, setup: Setup) -> None:
        local_sgd(
            setup, "FedDC", "it reads a client's mean gradient off w − θ_k and counts plain steps", momentum=False
        )
        full_uploads(setup, "FedDC", "its gradient corrections would still travel in full")
        self.drifts, self.controls = setup.stores.open("feddc_drift"), setup.stores.open("feddc_control")
        exact_store(self.drifts, "FedDC")

    def on_clients_start(self, stack: ClientStack, download: Download) -> None:
        """The constant part α (h_k − w) + c − c_k of each client's extra gradient, ``[K, *shape]``."""
        control = download.extra["feddc"]
        self._drift = self.drifts.read(stack.clients, control)
        self._own = self.controls.read(stack.clients, control)
        pull = torch._foreach_sub(list(self._drift.values()), [download.model[name] for name in control])
        torch._foreach_mul_(pull, self.alpha)
        torch._foreach_add_(pull, list(control.values()))
        torch._foreach_sub_(pull, list(self._own.values()))
        self._pull = dict(zip(control, pull, strict=True))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stack = self.stack
        names, grads = zip(*stack.named_grads(), strict=True)
        with torch.no_grad():
            torch._foreach_add_(list(grads), [self._pull[name][: stack.active] for name in names])
            torch._foreach_add_(list(grads), [stack.leaves[name] for name in names], alpha=self.alpha)

    def on_clients_end(self, stack: ClientStack, download: Download) -> None:
        self._pull = {}

    def on_upload(self, upload: Upload, download: Download) -> None:
        """Sends c_k⁺ − c_k."""
        control = download.extra["feddc"]
        like = next(iter(control.values()))
        scale = on_device(-1 / (upload.num_steps * download.lr), like.device, like.dtype)
        kept = control if self.takes_out else self._own
        change = {}
        for name, t in kept.items():
            delta = upload.delta[name]
            change[name] = (delta * per_client(scale, delta)).sub_(t)
        upload.send("feddc", change)

    def on_sent(self, upload: Upload, download: Download) -> None:
        """Moves h_k and c_k of the clients whose upload counts, so that the server's means stay those of all."""
        self.drifts.move(upload.clients, self._drift, upload.delta, upload.finite, download.round)
        self.controls.move(upload.clients, self._own, upload.extra["feddc"], upload.finite, download.round)
        self._drift, self._own = {}, {}


class MeanDrift(ServerPart):
    """What the server does: send c, and add the mean drift to the mean update."""

    def validate(self, setup: Setup) -> None:
        uniform_mean(setup, "FedDC", "the server follows the mean drift through the plain mean of the updates")
        plain_server(setup, "FedDC", "it sets the model itself, to the mean of the clients' plus the mean drift")
        self.names = setup.names

    def on_broadcast(self, download: Download, round: Round) -> None:
        self.control = self.server_state("c", {name: round.start[name] for name in self.names})
        download.extra["feddc"] = self.control

    def uploads(self, round: Round) -> dict[str, Params]:
        return {"feddc": self.control}

    def on_aggregate_end(self, update: Params, round: Round) -> None:
        mean, share = [update[name] for name in self.names], round.num_finite / round.num_clients
        drift = list(self.server_state("h", self.control).values())
        torch._foreach_add_(drift, mean, alpha=share)
        torch._foreach_add_(mean, drift)
        received = [round.received["feddc"][name] for name in self.names]
        torch._foreach_add_(list(self.control.values()), received, alpha=share)
