"""Gradient centralization with other means of a convolution's gradient: GC-Fed, Table 8."""

from typing import Any, Literal

from gcfed.methods.centralization import GradientCentralization
from gcfed.methods.projection import input_axes
from gcfed.utils.checked import checked

Mean = Literal["out_in", "out_kernel", "out_in_height", "in_kernel"]

#: Shape of the mean μ of a weight ``[out, in, kw, kh]`` → axes of the mean, counted from the end.
#: The paper's choice, the core's, has the shape ``[C_out, 1, 1, 1]``.
MEAN_AXES: dict[Mean, tuple[int, ...]] = {
    "out_in": (-2, -1),  # [C_out, C_in, 1, 1]
    "out_kernel": (-3,),  # [C_out, 1, K_w, K_h]
    "out_in_height": (-2,),  # [C_out, C_in, 1, K_h]
    "in_kernel": (-4,),  # [1, C_in, K_w, K_h]
}


@checked
class ShapedCentralization(GradientCentralization):
    """Local and Global GC with another ``mean`` in convolutions.

    All other settings are those of
    :class:`~gcfed.methods.centralization.GradientCentralization`.
    """

    def __init__(self, *, mean: Mean, **settings: Any) -> None:
        super().__init__(**settings)

        def mean_axes(ndim: int) -> tuple[int, ...]:
            return MEAN_AXES[mean] if ndim == 4 else input_axes(ndim)

        self.local_gc.mean_axes = mean_axes
        self.global_gc.mean_axes = mean_axes
