"""The kernels of torch's fused optimizers on a CPU, called directly.

``step`` also has a profiler hook, which takes 5 % of a small network's local step, and sorts its
tensors by device and type, which takes another 8 %.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from gcfed.utils.layout import in_memory_order

Step = Callable[[], object]


def direct_step(optimizer: Optimizer, own_step: Step) -> Step | None:
    """A faster step of an optimizer, with the same bits; None if there is none.

    It calls ``own_step`` where tensors are missing.
    """
    kernel = {SGD: SGDKernel, Adam: AdamKernel, AdamW: AdamKernel}.get(type(optimizer))
    group, *others = optimizer.param_groups
    if kernel is None or others or not group["fused"]:
        return None
    params = group["params"]
    if len({p.dtype for p in params}) > 1 or any(p.device.type != "cpu" for p in params):
        return None
    if kernel is AdamKernel and (group["amsgrad"] or isinstance(group["lr"], Tensor)):
        return None
    return kernel(optimizer, own_step)


class FusedKernel:
    """Calls the kernel of an optimizer with one group."""

    def __init__(self, optimizer: Optimizer, own_step: Step) -> None:
        self.optimizer = optimizer
        self.own_step = own_step
        (self.group,) = optimizer.param_groups

    def __call__(self) -> None:
        params = self.group["params"]
        grads = [p.grad for p in params]
        if any(grad is None or grad.is_sparse for grad in grads):
            self.own_step()
            return
        with torch.no_grad():  # a decorator would be made anew for each client
            self.run(params, grads)

    def run(self, params: list[Tensor], grads: list[Tensor]) -> None:
        raise NotImplementedError

    def states(self, name: str) -> list[Tensor | None]:
        """The parameters' states of this name; None where there is none."""
        # the dictionary would make an empty entry for a missing key
        return [self.optimizer.state.get(p, {}).get(name) for p in self.group["params"]]


class SGDKernel(FusedKernel):
    """SGD. In its first step the kernel fills the momentum."""

    def run(self, params: list[Tensor], grads: list[Tensor]) -> None:
        group = self.group
        buffers: list[Tensor] = []
        first = False
        if group["momentum"]:
            kept = self.states("momentum_buffer")
            first = all(t is None for t in kept)
            if first:
                kept = self._new_buffers(params, grads)
            buffers = [t for t in kept if t is not None]
            if len(buffers) < len(params):
                self.own_step()
                return
            params, grads, buffers = in_memory_order(params, grads, buffers)
        else:
            params, grads = in_memory_order(params, grads)
        torch._fused_sgd_(
            params,
            grads,
            buffers,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=first,
        )

    def _new_buffers(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
        buffers: list[Tensor | None] = []
        for p, grad in zip(params, grads, strict=True):
            buffer = torch.empty_like(grad)
            self.optimizer.state[p]["momentum_buffer"] = buffer
            buffers.append(buffer)
        return buffers


class AdamKernel(FusedKernel):
    """Adam and AdamW. Their own step makes the states."""

    def run(self, params: list[Tensor], grads: list[Tensor]) -> None:
        group = self.group
        names = ("exp_avg", "exp_avg_sq", "step")
        means, squares, steps = ([t for t in self.states(n) if t is not None] for n in names)
        if len(means) < len(params):
            self.own_step()
            return
        params, grads, means, squares = in_memory_order(params, grads, means, squares)
        torch._foreach_add_(steps, 1)
        decoupled = group["decoupled_weight_decay"]
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        kernel(
            params,
            grads,
            means,
            squares,
            [],
            steps,
            amsgrad=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
