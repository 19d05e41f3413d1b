"""The kernels of torch's fused optimizers on a CPU, called directly.

``step`` also has a profiler hook, and sorts its tensors by device and type. Processor time of a
client, in turn with each part and without it, lower quartiles (busy AMD EPYC, one thread): without
the direct call 11 % more with FedAvg on the digits, 6 % with GC-Fed, 38 % with Adam, and 5 % with
ResNet18 in batches of 8, of which 4 % are the flat views. Gradients that go to the kernel directly
save 4 % of FedAvg on the digits. The CNN in batches of 50 gains nothing from any of them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from gcfed.utils.layout import have_same_order, in_memory_order

Step = Callable[[], object]
Tensors = list[Tensor]


def direct_step(optimizer: Optimizer, own_step: Step) -> Step | None:
    """A faster step of an optimizer, with the same bits; None if there is none.

    It calls ``own_step`` where tensors are missing.
    """
    kernel = {SGD: SGDKernel, Adam: AdamKernel, AdamW: AdamKernel}.get(type(optimizer))
    group, *others = optimizer.param_groups
    if kernel is None or others or not group["fused"]:
        return None
    params = group["params"]
    types = {parameter.dtype for parameter in params}
    devices = {parameter.device.type for parameter in params}
    if len(types) > 1 or devices - {"cpu"}:
        return None
    if kernel is AdamKernel and (group["amsgrad"] or isinstance(group["lr"], Tensor)):
        return None
    return kernel(optimizer, own_step)


def ordered_step(optimizer: Optimizer, own_step: Step) -> Step:
    """A step of torch's fused optimizers that first puts gradients in order: see
    :func:`gradient_in_order`.
    """

    def step() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient_in_order(parameter)
        own_step()

    return step


def gradient_in_order(parameter: Tensor) -> Tensor | None:
    """A parameter's gradient, with its entries in the parameter's order in memory.

    Autograd makes it so, but a hook or a method may assign another one. torch's fused kernels would
    read its memory in the wrong order, and move the wrong weights.
    """
    grad = parameter.grad
    if grad is None or grad.is_sparse or grad.stride() == parameter.stride():
        return grad
    if not have_same_order(grad, parameter):
        parameter.grad = torch.empty_like(parameter).copy_(grad)
    return parameter.grad


class FusedKernel:
    """Calls the kernel of an optimizer with one group.

    It keeps the lists of parameters and states, in the order of memory, until the group has other
    parameters or the states are cleared.

    Attributes:
        names: of the states that the kernel takes.
    """

    names: Sequence[str] = ()

    def __init__(self, optimizer: Optimizer, own_step: Step) -> None:
        self.optimizer = optimizer
        self.own_step = own_step
        (self.group,) = optimizer.param_groups
        self._params: Tensors | None = None  # those that the kept lists belong to
        self._lists: list[Tensors] = []  # the parameters, and each of their states
        self._strides: dict[int, tuple[int, ...]] = {}  # of gradients that are read as vectors
        self._orders: list[tuple[int, ...]] = []  # the parameters' strides
        self._first = False  # whether the kernel fills the states in its next call

    def __call__(self, given: Sequence[Tensor | None] | None = None) -> None:
        """Makes a step with the parameters' gradients, or with given ones of as many entries."""
        params = self.group["params"]
        grads = self._dense_gradients(self._own_gradients(params) if given is None else given)
        if grads is None or not (self._knows(params, grads) or self._collect(params, grads)):
            self._make_own_step(params, given)
            return
        for i in self._strides:
            grads[i] = grads[i].as_strided((grads[i].numel(),), (1,))
        self.run(grads, self._first)
        self._first = False

    def run(self, grads: Tensors, first: bool) -> None:
        raise NotImplementedError

    def _own_gradients(self, params: Tensors) -> list[Tensor | None]:
        """The parameters' gradients, in their order in memory."""
        if params is not self._params:
            return [gradient_in_order(parameter) for parameter in params]
        grads: list[Tensor | None] = []
        for parameter, order in zip(params, self._orders, strict=True):
            grad = parameter.grad
            if grad is not None and (grad.is_sparse or grad.stride() != order):
                grad = gradient_in_order(parameter)
            grads.append(grad)
        return grads

    @staticmethod
    def _dense_gradients(
        gradients: Sequence[Tensor | None],
    ) -> Tensors | None:
        """The gradients of the step; None if one is missing or sparse."""
        grads = []
        for grad in gradients:
            if grad is None or grad.is_sparse:
                return None
            grads.append(grad.detach() if grad.requires_grad else grad)
        return grads

    def _knows(self, params: Tensors, grads: Tensors) -> bool:
        """Whether the kept lists are those of these parameters, and gradients lie as before."""
        if params is not self._params or self._has_no_state(params[0]):
            return False
        if not self._strides:
            return True
        return all(grads[number].stride() == strides for number, strides in self._strides.items())

    def _has_no_state(self, parameter: Tensor) -> bool:
        """Whether the optimizer has not begun, or begins again."""
        return bool(self.names) and parameter not in self.optimizer.state

    def _make_own_step(self, params: Tensors, gradients: Sequence[Tensor | None] | None) -> None:
        """The optimizer's own step, which may make states."""
        self._params = None
        if gradients is None:
            self.own_step()
            return
        for parameter, grad in zip(params, gradients, strict=True):
            parameter.grad = None if grad is None else grad.view_as(parameter)
        self.own_step()
        for parameter in params:
            parameter.grad = None

    def _collect(self, params: Tensors, grads: Tensors) -> bool:
        """Lists the tensors of these parameters. Returns False if states are missing."""
        states: list[Tensors] = []
        for name in self.names:
            kept = self._states(name, params)
            if len(kept) < len(params):
                return False
            states.append(kept)
        # Without their history, because a step is no part of it. ``no_grad`` would take longer.
        own = [parameter.detach() for parameter in params]
        *self._lists, vectors = in_memory_order(own, *states, grads)
        self._strides = {}
        for i, (vector, grad) in enumerate(zip(vectors, grads, strict=True)):
            if vector is not grad:
                self._strides[i] = grad.stride()
        self._orders = [parameter.stride() for parameter in params]
        self._params = params
        return True

    def _states(self, name: str, params: Tensors) -> Tensors:
        """Those states of this name that exist."""
        # the dictionary would make an empty entry for a missing key
        states = [self.optimizer.state.get(parameter, {}).get(name) for parameter in params]
        return [t for t in states if t is not None]


class SGDKernel(FusedKernel):
    """SGD. In its first step the kernel fills the momentum."""

    def __init__(self, optimizer: Optimizer, own_step: Step) -> None:
        super().__init__(optimizer, own_step)
        if self.group["momentum"]:
            self.names = ("momentum_buffer",)

    def _collect(self, params: Tensors, grads: Tensors) -> bool:
        if self.names and not self._states("momentum_buffer", params):
            self._first = True
            for parameter, grad in zip(params, grads, strict=True):
                self.optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(
                    grad.view_as(parameter)
                )
        return super()._collect(params, grads)

    def run(self, grads: Tensors, first: bool) -> None:
        group = self.group
        params, *momentum = self._lists
        torch._fused_sgd_(
            params,
            grads,
            momentum[0] if momentum else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=first,
        )


class AdamKernel(FusedKernel):
    """Adam and AdamW. Their own step makes the states."""

    names = ("exp_avg", "exp_avg_sq")

    def _collect(self, params: Tensors, grads: Tensors) -> bool:
        self._counts = self._states("step", params)
        return super()._collect(params, grads)

    def run(self, grads: Tensors, first: bool) -> None:
        group = self.group
        params, means, squares = self._lists
        torch._foreach_add_(self._counts, 1)
        decoupled = group["decoupled_weight_decay"]
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        kernel(
            params,
            grads,
            means,
            squares,
            [],
            self._counts,
            amsgrad=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
