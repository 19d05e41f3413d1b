"""Gradient centralization, local and global: GC-Fed (arXiv 2503.13180, Algorithm 1).

``P = I − eeᵀ`` takes the mean over a layer's inputs out of the gradient of each output: for a weight ``[out, in]`` or
``[out, in, kh, kw]`` the mean over every axis but the first. The authors do so everywhere, and so an embedding
``[tokens, dim]`` loses the mean over its outputs. Local GC projects each local gradient of the first layers (line 14),
Global GC the aggregated update of all layers (line 20).
"""

import logging
from collections.abc import Sequence
from math import floor
from typing import Literal

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from gcfed.federated.method import ClientPart, Download, Method, ServerPart, Setup
from gcfed.methods.local_norm import no_steps
from gcfed.utils.checked import Count, SettingError, Share, checked

log = logging.getLogger(__name__)

# Table 8, by the shape of the mean μ of a convolution [out, in, kh, kw]: the axes that are averaged away, counted from
# the end so that a leading client axis changes nothing.
Mean = Literal["out", "out_in", "out_kernel", "out_in_height", "in_kernel"]
MEAN_AXES: dict[Mean, tuple[int, ...]] = {
    "out": (-3, -2, -1),  # [C_out, 1, 1, 1], the paper's choice
    "out_in": (-2, -1),  # [C_out, C_in, 1, 1]
    "out_kernel": (-3,),  # [C_out, 1, K_w, K_h]
    "out_in_height": (-2,),  # [C_out, C_in, 1, K_h]
    "in_kernel": (-4,),  # [1, C_in, K_w, K_h]
}


def centralize_(grad: Tensor, ndim: int, mean: Mean = "out") -> None:
    """Projects a gradient ``[*shape]``, or ``[K, *shape]`` of K clients, in place: ``grad ← P grad``.

    Args:
        ndim: number of axes of the parameter itself, without the client axis.
        mean: shape of μ for convolutions; other tensors average over all axes but the first, and vectors over their
            only one. A mean of a single number takes nothing out: it would be all that there is to train.
    """
    axes = MEAN_AXES[mean] if ndim == 4 else tuple(range(-max(ndim - 1, 1), 0))
    total = grad.sum(axes, keepdim=True)
    if total.numel() < grad.numel():
        grad.sub_(total, alpha=total.numel() / grad.numel())  # two kernels; a mean would divide in one of its own


@checked
class GradientCentralization(Method):
    """Local GC up to a borderline, Global GC over the aggregated update, or both: GC-Fed.

    Args:
        local: centralize the clients' gradients of the tensors before the borderline.
        server: centralize the aggregated update (Global GC).
        lam: λ; the first ⌊λL⌋ of the L parameter tensors that are trained get Local GC. Wins over ``boundary``.
        boundary: name of the first module that gets no Local GC (``fc2``, ``classifier``, …); ``auto``: the last
            one with parameters; None: Local GC in every layer, which only ``server=False`` allows.
        mean: shape of μ in convolutions, Table 8.
        tensors: ``weights`` (two axes or more; the paper's shapes) or ``all`` (vectors too; the authors' code).
        local_rounds: Local GC in the first so many rounds only; None: in all.
        server_boundary: name of the first module that gets Global GC; None: all of them, as in the paper.
    """

    def __init__(
        self,
        *,
        local: bool = True,
        server: bool = True,
        lam: Share | None = None,
        boundary: str | None = None,
        mean: Mean = "out",
        tensors: Literal["weights", "all"] = "weights",
        local_rounds: Count | None = None,
        server_boundary: str | None = None,
    ) -> None:
        if local and server and lam is None and boundary is None:
            raise SettingError(
                "boundary",
                " and lam are null, and local and server need a borderline: set boundary to a module of the model "
                "or lam in [0, 1], or take gc=local or gc=global.",
            )
        of_local, of_server = {"lam": lam, "local_rounds": local_rounds}, {"server_boundary": server_boundary}
        for has, kind, settings in ((local, "Local", of_local), (server, "Global", of_server)):
            for key, value in settings.items() if not has else ():
                if value is not None:
                    raise SettingError(key, f"={value} is read by nothing: this gc has no {kind} GC.")
        least = 2 if tensors == "weights" else 1
        self.local = LocalGC(lam, boundary, local_rounds, mean, least)
        self.server = GlobalGC(server_boundary, mean, least)
        super().__init__(*[self.local] * local, *[self.server] * server)


class LocalGC(ClientPart):
    """Line 14, in the tensors before the borderline that have ``least`` axes."""

    graphable = True

    def __init__(self, lam: float | None, boundary: str | None, rounds: int | None, mean: Mean, least: int) -> None:
        self.lam, self.boundary, self.rounds, self.mean, self.least = lam, boundary, rounds, mean, least
        self.lasting, self._now = rounds is None, True

    def validate(self, setup: Setup) -> None:
        net = setup.module.net
        _check_mean(net, self.mean)
        names = [name for name, param in net.named_parameters() if self.lam is None or param.requires_grad]
        before = len(names)
        if self.lam is not None:
            before = floor(self.lam * len(names) + 1e-9)  # 0.29 · 100 is 28.999… in floating point
        elif self.boundary == "auto":
            last = names[-1].rpartition(".")[0]
            before = next(i for i, n in enumerate(names) if n.rpartition(".")[0] == last)
            log.info("gc.boundary=%s, the last module with parameters: no Local GC from here on", last)
        elif self.boundary is not None:
            before = _first(net, names, "boundary", self.boundary)
        self.ndim = _axes(net, names[:before], self.least)
        if not self.ndim and self.lam != 0:
            log.warning("there is no Local GC: no trained weight lies before its borderline (gc.boundary, gc.lam)")

    def on_download(self, download: Download) -> None:
        self._now = self.rounds is None or download.round < self.rounds

    def on_after_backward(self, *_: object) -> None:
        for name, ndim in self.ndim.items() if self._now else ():
            if (grad := self.stack.leaves[name].grad) is not None:  # [n, *shape]
                centralize_(grad, ndim, self.mean)


class GlobalGC(ServerPart):
    """Line 20, from a module on."""

    def __init__(self, boundary: str | None, mean: Mean, least: int) -> None:
        self.boundary, self.mean, self.least = boundary, mean, least

    def validate(self, setup: Setup) -> None:
        net, apart = setup.module.net, no_steps(setup)  # a mean of what clients keep
        _check_mean(net, self.mean)
        names = [name for name, _ in net.named_parameters()]
        first = 0 if self.boundary is None else _first(net, names, "server_boundary", self.boundary)
        self.ndim = _axes(net, [name for name in names[first:] if name not in apart], self.least)
        if not self.ndim:
            log.warning("there is no Global GC: no trained weight has it (gc.tensors, gc.server_boundary)")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        for name, param in pl_module.net.named_parameters():  # type: ignore[union-attr]
            if name in self.ndim and param.grad is not None:
                centralize_(param.grad, self.ndim[name], self.mean)


def _check_mean(net: nn.Module, mean: Mean) -> None:
    """Refuses a mean of another shape where nothing would read it."""
    if mean != "out" and not any(p.dim() == 4 for p in net.parameters() if p.requires_grad):
        kind = type(net).__name__
        raise ValueError(f"gc.mean={mean} is of convolutions, and {kind} trains none: leave it at out.")


def _axes(net: nn.Module, names: Sequence[str], least: int) -> dict[str, int]:
    """Those of the parameters that have so many axes and are trained, with their number of axes."""
    params = dict(net.named_parameters())
    return {name: params[name].dim() for name in names if params[name].dim() >= least and params[name].requires_grad}


def _first(net: nn.Module, names: Sequence[str], key: str, module: str) -> int:
    """Place of the first parameter of a module."""
    for i, name in enumerate(names):
        if name.startswith(f"{module}."):
            return i
    modules = [m for m, _ in net.named_modules() if m and any(name.startswith(f"{m}.") for name in names)]
    raise ValueError(
        f"gc.{key}={module!r} names no module of {type(net).__name__} with parameters. "
        f"There are: {', '.join(modules)}. Set gc.{key} to one of them{', or gc.lam' * (key == 'boundary')}."
    )
