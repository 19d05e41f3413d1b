"""P = I − eeᵀ, the projection of gradient centralization (GC-Fed, eq. 1 to 3).

P subtracts from each output's entries their mean over the layer's inputs. The outputs are the first
axis of a weight, ``[out, in]`` or ``[out, in, kh, kw]``. A transposed convolution has ``[in, out /
groups, kh, kw]``: there they are the second axis, and each group of inputs has outputs of its own.
An embedding has ``[tokens, dim]``, and each row loses its mean, as in the authors' code.
"""

from functools import cache

from torch import Tensor


@cache  # each local step asks for them
def input_axes(ndim: int) -> tuple[int, ...]:
    """The axes of the inputs of a tensor with ``ndim`` axes: all but the first, or the only one.

    They are counted from the end, so that a leading client axis does not matter.
    """
    return tuple(range(-max(ndim - 1, 1), 0))


def centralize_(
    grad: Tensor, ndim: int, groups: int = 0, axes: tuple[int, ...] | None = None
) -> None:
    """Projects a gradient ``[*shape]``, or ``[K, *shape]`` of K clients, in place: ``grad ← P
    grad``.

    A mean over a single number is not subtracted: nothing would be left to train.

    Args:
        ndim: number of axes of the parameter itself, without the client axis.
        groups: of a transposed convolution; 0 for all other tensors.
        axes: the axes of the mean, counted from the end; None: those of the inputs.
    """
    if axes is None:
        axes = input_axes(ndim)
    if groups:
        grad = grad.unflatten(-ndim, (groups, -1))
        swapped = {-ndim: 1 - ndim, 1 - ndim: -ndim}
        axes = tuple(swapped.get(axis, axis) for axis in axes)
    total = grad.sum(axes, keepdim=True)
    if total.numel() < grad.numel():
        # two kernels; a mean needs a third to divide
        grad.sub_(total, alpha=total.numel() / grad.numel())


def by_output(grad_K: Tensor, groups: int = 0) -> Tensor:
    """``[K, *shape]`` → ``[K, out, in]``; P subtracts the mean of each row. ``groups`` as in
    :func:`centralize_`.
    """
    if groups:
        grad_K = grad_K.unflatten(1, (groups, -1)).transpose(2, 3).flatten(1, 2)
    return grad_K.flatten(2)
