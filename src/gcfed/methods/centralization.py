"""Gradient centralization, local and global: GC-Fed (arXiv 2503.13180, Algorithm 1).

``P = I − eeᵀ`` subtracts from each output's gradient its mean over the layer's inputs: for a weight
``[out, in]`` or ``[out, in, kh, kw]`` the mean over every axis but the first, for a transposed
convolution's ``[in, out, kh, kw]`` over every axis but the second. In an embedding ``[tokens,
dim]`` each row loses its mean, as in the authors' code. Local GC projects each local gradient of
the first layers (line 14), Global GC the aggregated update of all layers (line 20).
"""

import logging
from collections.abc import Iterable
from math import floor
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import SGD, Optimizer

from gcfed.federated.parts import ClientPart, Download, Method, ServerPart, Setup
from gcfed.models.adapters import A, B, centre_a
from gcfed.optim.partial import probe_optimizer
from gcfed.utils.checked import Count, SettingError, Share, checked
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)

# Table 8: shape of the mean μ of a convolution [out, in, kh, kw] → axes to average over. They are
# counted from the end, so that a leading client axis does not matter.
Mean = Literal["out", "out_in", "out_kernel", "out_in_height", "in_kernel"]
MEAN_AXES: dict[Mean, tuple[int, ...]] = {
    "out": (-3, -2, -1),  # [C_out, 1, 1, 1], the paper's choice
    "out_in": (-2, -1),  # [C_out, C_in, 1, 1]
    "out_kernel": (-3,),  # [C_out, 1, K_w, K_h]
    "out_in_height": (-2,),  # [C_out, C_in, 1, K_h]
    "in_kernel": (-4,),  # [1, C_in, K_w, K_h]
}


def centralize_(grad: Tensor, ndim: int, mean: Mean = "out", groups: int = 0) -> None:
    """Projects a gradient ``[*shape]``, or ``[K, *shape]`` of K clients, in place: ``grad ← P
    grad``.

    Args:
        ndim: number of axes of the parameter itself, without the client axis.
        mean: shape of μ for convolutions; other tensors average over all axes but the first, and
            vectors over their only one. A mean over a single number is not subtracted: nothing
            would be left to train.
        groups: of a transposed convolution, ``[in, out / groups, …]``, whose outputs depend on the
            inputs of their own group; 0 for all other tensors.
    """
    axes = MEAN_AXES[mean] if ndim == 4 else tuple(range(-max(ndim - 1, 1), 0))
    if groups:
        grad = grad.unflatten(-ndim, (groups, -1))
        axes = tuple({-ndim: 1 - ndim, 1 - ndim: -ndim}.get(axis, axis) for axis in axes)
    total = grad.sum(axes, keepdim=True)
    if total.numel() < grad.numel():
        # two kernels; a mean needs a third to divide
        grad.sub_(total, alpha=total.numel() / grad.numel())


@checked
class GradientCentralization(Method):
    """Local GC up to a borderline, Global GC over the aggregated update, or both: GC-Fed.

    Args:
        local: centralize the clients' gradients of the tensors before the borderline.
        server: centralize the aggregated update (Global GC).
        lam: λ; the first ⌊λL⌋ of the L parameter tensors that are trained get Local GC. Overrides
            ``boundary``.
        boundary: name of the first module that gets no Local GC (``fc2``, ``classifier``, …);
            ``auto``: the last one with a weight; None: Local GC in every layer, which only
            ``server=False`` allows.
        mean: shape of μ in convolutions, Table 8.
        tensors: ``weights`` (of layers, with two axes or more; the paper's shapes) or ``all``
            (vectors, class tokens and position embeddings too; the authors' code).
        local_rounds: number of first rounds with Local GC; None: all.
        server_boundary: name of the first module that gets Global GC; None: all of them, as in the
            paper.
        lora: ``centre_a``: centre the rows of all factors A of adapters W₀ + BA once and centralize
            their gradients and updates, but not those of B. Then A1 = 0, so (BA)1 = 0 after each
            round, as GC has it for W. Ours.

    "First" and "last" refer to the order of a forward pass
    (:class:`~gcfed.models.order.ForwardOrder`).
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
        lora: Literal["centre_a"] | None = None,
    ) -> None:
        if lora and not (local and server and mean != "in_kernel"):
            raise SettingError(
                "lora", f"={lora} needs local=true, server=true, and another mean than in_kernel."
            )
        if local and server and lam is None and boundary is None:
            what = (
                " and lam are null, but Local and Global GC together need a borderline: set"
                " boundary to a module, "
            )
            raise SettingError(
                "boundary", f"{what}set lam in [0, 1], or use gc=local or gc=global."
            )
        least = 2 if tensors == "weights" else 1
        self.local = LocalGC(lam, boundary, local_rounds, mean, least, lora is not None)
        self.server = GlobalGC(server_boundary, mean, least, lora is not None)
        super().__init__(*[self.local] * local, *[self.server] * server)


class LocalGC(ClientPart):
    """Line 14, in the tensors before the borderline that have ``least`` axes."""

    def __init__(
        self,
        lam: float | None,
        boundary: str | None,
        rounds: int | None,
        mean: Mean,
        least: int,
        lora: bool = False,
    ) -> None:
        self.lam, self.boundary, self.rounds, self.mean, self.least = (
            lam,
            boundary,
            rounds,
            mean,
            least,
        )
        self.recordable, self._now, self.lora = "run" if rounds is None else "stack", True, lora

    def validate(self, setup: Setup) -> None:
        order, trained = setup.forward_order, set(setup.names)
        names = [name for name in order.names if name in trained]
        if self.lam is not None:
            # 0.29 · 100 is 28.999… in floating point
            chosen = names[: floor(self.lam * len(names) + 1e-9)]
        elif self.boundary == "auto":
            last = (order.weights or order.names)[-1]
            module, parametrized, _ = last.partition(".parametrizations.")
            module = module if parametrized else last.rpartition(".")[0] or last
            log.info(
                "gc.boundary=%s, the last module with a weight: no Local GC from here on", module
            )
            chosen = order.before(order.place.get(last, 0))
        elif self.boundary is not None:
            chosen = order.before(_place(setup, "boundary", self.boundary))
        else:
            chosen = names
        if self.lora:
            chosen = _with_a(setup, names, chosen)
        self.groups, self.ndim = order.groups, _axes(setup, chosen, self.least)
        if self.ndim:
            every, shown = (
                _axes(setup, names, self.least),
                ", ".join(n.removesuffix(".weight") for n in self.ndim),
            )
            log.info("Local GC in %d of %d tensors: %s", len(self.ndim), len(every), shown)
        elif self.lam != 0:
            log.warning(
                "there is no Local GC: no trained weight lies before its borderline (gc.boundary,"
                " gc.lam)"
            )

    def on_download(self, download: Download) -> None:
        self._now = self.rounds is None or download.round < self.rounds

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for name, ndim in self.ndim.items() if self._now else ():
            if (grad := pl_module.clients.leaves[name].grad) is not None:  # [n, *shape]
                centralize_(grad, ndim, self.mean, self.groups.get(name, 0))


class GlobalGC(ServerPart):
    """Line 20, for all modules from ``boundary`` on."""

    def __init__(self, boundary: str | None, mean: Mean, least: int, lora: bool = False) -> None:
        self.boundary, self.mean, self.least, self.lora = boundary, mean, least, lora

    def validate(self, setup: Setup) -> None:
        # entries that clients keep are only averaged
        order, excluded = setup.forward_order, setup.no_steps
        if self.boundary is not None:
            excluded.update(order.before(_place(setup, "server_boundary", self.boundary)))
        names = [name for name in order.names if name not in excluded]
        if self.lora:
            names = _with_a(setup, order.names, names)
            if not isinstance(probe_optimizer(setup.module.server), SGD):
                raise Refusal(
                    "gc.lora=centre_a needs server=sgd: other optimizers move the mean of A."
                )
        self.groups, self.ndim = order.groups, _axes(setup, names, self.least)
        if not self.ndim:
            log.warning(
                "there is no Global GC: it applies to no trained weight (gc.tensors,"
                " gc.server_boundary)"
            )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        for name, param in pl_module.net.named_parameters():  # type: ignore[union-attr]
            if name in self.ndim and param.grad is not None:
                centralize_(param.grad, self.ndim[name], self.mean, self.groups.get(name, 0))


def _axes(setup: Setup, names: Iterable[str], least: int) -> dict[str, int]:
    """The parameters among ``names`` that are trained and centralized, with their
    number of axes.
    """
    params, added = (
        dict(setup.module.net.named_parameters()),
        setup.forward_order.added if least > 1 else set(),
    )
    trained = {
        name: params[name].dim()
        for name in names
        if params[name].requires_grad and name not in added
    }
    return {name: ndim for name, ndim in trained.items() if ndim >= least}


def _with_a(setup: Setup, names: list[str], chosen: list[str]) -> list[str]:
    """Centres the factors A of adapters. Returns them, and of ``chosen`` what is no factor B."""
    if not centre_a(setup.module.net):
        raise Refusal("gc.lora=centre_a needs adapters: set model.lora.rank.")
    return [name for name in names if A in name or (name in chosen and B not in name)]


def _place(setup: Setup, key: str, module: str) -> int:
    """The position in the forward pass at which the first parameter of a module is used."""
    net, order = setup.module.net, setup.forward_order
    names = {id(p): name for name, p in order.params.items()}  # a tied parameter has one name
    found = {m: [names[id(p)] for p in part.parameters()] for m, part in net.named_modules() if m}
    if inside := found.get(module):  # peft keeps an unused copy of a trained module
        return min(order.place[name] for name in {*inside} - {*order.unused} or inside)
    choices = (
        f"There are: {', '.join(m for m, inside in found.items() if inside)}. Set gc.{key} to one"
        " of them."
    )
    raise Refusal(
        f"gc.{key}={module!r} names no module of {type(net).__name__} with parameters. {choices}"
    )
