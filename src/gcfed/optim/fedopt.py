"""FedAdagrad, FedAdam and FedYogi, "Adaptive Federated Optimization" (Reddi et al., ICLR 2021),
Algorithm 2.

Unlike torch.optim's versions, they do not correct the bias, and v starts at τ². The gradient is
``p.grad = −Δ``.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from gcfed.utils.checked import LARGEST, ShareBelow1, Weight, checked

Divisor = Annotated[float, Field(ge=1e-12, le=LARGEST)]


@checked
class _FedOpt(Optimizer):
    """m ← β₁m + (1−β₁)Δ; v by the subclass's rule; w ← w + η m/(√v + τ).

    State per parameter, in its shape: ``exp_avg`` is −m (the gradient's sign, as in
    torch.optim.Adam), ``v`` is v.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Weight = 1e-2,
        betas: Sequence[ShareBelow1] = (0.9, 0.99),
        tau: Divisor = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "tau": tau})

    def _update_v(self, v: Tensor, grad: Tensor, *betas: float) -> None:
        """Updates the second moment in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Makes one step for the parameters that have a gradient.

        Returns the closure's loss, if there is a closure.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            lr = group["lr"]
            betas = group["betas"]
            tau = group["tau"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = {
                        "exp_avg": torch.zeros_like(parameter),
                        "v": torch.full_like(parameter, tau**2),
                    }
                exp_avg = self.state[parameter]["exp_avg"]
                v = self.state[parameter]["v"]
                exp_avg.lerp_(parameter.grad, 1 - betas[0])
                self._update_v(v, parameter.grad, *betas)
                parameter.addcdiv_(exp_avg, v.sqrt().add_(tau), value=-lr)
        return loss


@checked
class FedAdagrad(_FedOpt):
    """v ← v + Δ²."""

    def __init__(
        self, params: ParamsT, lr: Weight = 1e-2, beta1: ShareBelow1 = 0.0, tau: Divisor = 1e-3
    ) -> None:
        super().__init__(params, lr, (beta1,), tau)

    def _update_v(self, v: Tensor, grad: Tensor, *betas: float) -> None:
        v.addcmul_(grad, grad)


class FedAdam(_FedOpt):
    """v ← β₂v + (1−β₂)Δ²."""

    def _update_v(self, v: Tensor, grad: Tensor, *betas: float) -> None:
        v.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])


class FedYogi(_FedOpt):
    """v ← v − (1−β₂)Δ² sign(v − Δ²)."""

    def _update_v(self, v: Tensor, grad: Tensor, *betas: float) -> None:
        square = grad * grad
        v.addcmul_((v - square).sign_(), square, value=betas[1] - 1)
