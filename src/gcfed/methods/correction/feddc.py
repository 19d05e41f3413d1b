"""Local drift decoupling and correction: FedDC (Gao et al., CVPR 2022, eqs. 4 to 7).

Client k trains on ``L_k(θ) + α/2 ‖θ + h_k − w‖² + ⟨θ, c − c_k⟩`` and then keeps

- its drift, ``h_k ← h_k + (θ_k − w)`` (eq. 6), and
- its last update as a gradient, ``c_k ← −(θ_k − w) / (η τ_k)``, which is −g_k/(ηK) in the paper; c
    is the mean c_k.

The server's next model is ``w ← mean_cohort θ_k + mean_all h_k`` (eq. 7): the mean is over all N
clients, as in the authors' code, because a cohort's drifts do not cancel. FedDyn's server computes
it from the updates. τ_k is the client's own number of steps, so c is a mean of gradients.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from gcfed.federated.parts import (
    ClientPart,
    ClientStack,
    ClientStates,
    Download,
    Fact,
    KeptState,
    Method,
    Params,
    Upload,
    like_trained,
)
from gcfed.methods.correction.feddyn import UpdateSum
from gcfed.methods.correction.scaffold import MeanVariate
from gcfed.methods.estimates import gradients_beyond
from gcfed.methods.requirements import full_uploads, local_sgd
from gcfed.utils.checked import Weight, checked


@checked
class FedDC(Method):
    """Pulls each client towards w − h_k, corrects its gradient by c − c_k, and adds the mean drift
    to the model.

    Args:
        alpha: α, weight of the pull. Paper and code: 0.01 for CIFAR-10 and CIFAR-100, 0.1 for
            MNIST.
        correction: how c_k is updated: ``update``, from the last update only (the paper);
            ``control``, also minus the correction, ``c_k ← c_k − c − (θ_k − w) / (η τ_k)``, as in
            SCAFFOLD (the authors' code). Both reach the same optimum. The second is faster: the
            first reverses its last correction in every round.
    """

    def __init__(
        self, alpha: Weight = 0.01, *, correction: Literal["update", "control"] = "update"
    ) -> None:
        client = LocalDrift(alpha, correction == "control")
        super().__init__(client, MeanVariate("feddc"), UpdateSum())


class LocalDrift(ClientPart):
    recordable = "run"
    facts = {Fact.CORRECTS_DRIFT}
    needs = [
        local_sgd("it computes a client's mean gradient from w − θ_k and plain steps"),
        full_uploads("its gradient corrections would still be sent in full"),
    ]
    keeps = {
        "feddc_control": KeptState(like_trained),
        "feddc_drift": KeptState(like_trained),
    }  # c_k and h_k

    def __init__(self, alpha: float, takes_out: bool) -> None:
        self.alpha = alpha
        self.takes_out = takes_out

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Params:
        """The constant part α (h_k − w) + c − c_k of each client's extra gradient,
        ``[K, *shape]``.
        """
        constant = {}
        for name, mean in download.extra["feddc"].items():
            pull = (own["feddc_drift"][name] - download.broadcast_model[name]).mul_(self.alpha)
            constant[name] = pull.add_(mean).sub_(own["feddc_control"][name])
        return constant

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        stack = pl_module.clients
        grads, correction, weights = stack.with_grads(stack.prepared[self], stack.full)
        torch._foreach_add_(grads, correction)
        torch._foreach_add_(grads, weights, alpha=self.alpha)

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        known = download.extra["feddc"] if self.takes_out else own["feddc_control"]
        # c_k⁺ − c_k
        upload.send("feddc", gradients_beyond(known, upload, upload.num_steps * download.lr))

    def keep(self, upload: Upload, own: ClientStates, download: Download) -> Mapping[str, Params]:
        return {
            "feddc_control": own.add("feddc_control", upload.extra["feddc"], upload.finite),
            "feddc_drift": own.add("feddc_drift", upload.delta, upload.finite),
        }
