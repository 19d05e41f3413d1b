"""FedAdagrad, FedAdam and FedYogi, "Adaptive Federated Optimization" (Reddi et al., ICLR 2021), Algorithm 2.

Unlike torch.optim's versions, they do not correct the bias, and v starts at τ². The gradient is ``p.grad = −Δ``, as for
every server optimizer here.
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

    State per parameter, in its shape: ``exp_avg`` is −m (the gradient's sign, as in torch.optim.Adam), ``v`` is v.
    """

    def __init__(
        self, params: ParamsT, lr: Weight = 1e-2, betas: Sequence[ShareBelow1] = (0.9, 0.99), tau: Divisor = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "tau": tau})

    def _update_v(self, v: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        """Updates the second moments in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Makes one step for the parameters that have a gradient. Returns the closure's loss, if there is a closure."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "v": torch.full_like(p, group["tau"] ** 2)}
            grads = [p.grad for p in params]
            exp_avg, v = ([self.state[p][name] for p in params] for name in ("exp_avg", "v"))
            torch._foreach_lerp_(exp_avg, grads, 1 - group["betas"][0])
            self._update_v(v, grads, group)
            denominator = torch._foreach_sqrt(v)
            torch._foreach_add_(denominator, group["tau"])
            torch._foreach_addcdiv_(params, exp_avg, denominator, -group["lr"])
        return loss


@checked
class FedAdagrad(_FedOpt):
    """v ← v + Δ²."""

    def __init__(self, params: ParamsT, lr: Weight = 1e-2, beta1: ShareBelow1 = 0.0, tau: Divisor = 1e-3) -> None:
        super().__init__(params, lr, (beta1,), tau)

    def _update_v(self, v: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        torch._foreach_addcmul_(v, grads, grads)


class FedAdam(_FedOpt):
    """v ← β₂v + (1−β₂)Δ²."""

    def _update_v(self, v: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        beta2 = group["betas"][1]
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)


class FedYogi(_FedOpt):
    """v ← v − (1−β₂)Δ² sign(v − Δ²)."""

    def _update_v(self, v: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        squares = torch._foreach_mul(grads, grads)
        signs = torch._foreach_sub(v, squares)
        torch._foreach_sign_(signs)
        torch._foreach_addcmul_(v, signs, squares, group["betas"][1] - 1)
