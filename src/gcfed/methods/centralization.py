"""Gradient centralization, local and global: GC-Fed (arXiv 2503.13180, Algorithm 1).

Local GC projects each local gradient of the first layers (line 14). Global GC projects the
aggregated update of all layers (line 20). The projection is :mod:`gcfed.methods.projection`.
"""

import logging
from collections.abc import Callable, Iterable
from math import floor
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from torch.optim import SGD, Optimizer

from gcfed.federated.parts import ClientPart, Download, Method, ServerPart, Setup
from gcfed.federated.training.recorder import Recordable
from gcfed.methods.projection import centralize_, input_axes
from gcfed.models.adapters import FACTOR_A, FACTOR_B, centre_a
from gcfed.utils.checked import Count, SettingError, Share, checked
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)


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
        tensors: Literal["weights", "all"] = "weights",
        local_rounds: Count | None = None,
        server_boundary: str | None = None,
        lora: Literal["centre_a"] | None = None,
    ) -> None:
        if lora and not (local and server):
            raise SettingError("lora", f"={lora} needs local=true and server=true.")
        if local and server and lam is None and boundary is None:
            raise SettingError(
                "boundary",
                " and lam are null, but Local and Global GC together need a borderline: set"
                " boundary to a module, set lam in [0, 1], or use gc=local or gc=global.",
            )
        min_axes = 2 if tensors == "weights" else 1
        self.local_gc = LocalGC(lam, boundary, local_rounds, min_axes, lora is not None)
        self.global_gc = GlobalGC(server_boundary, min_axes, lora is not None)
        chosen: list[ClientPart | ServerPart] = []
        if local:
            chosen.append(self.local_gc)
        if server:
            chosen.append(self.global_gc)
        super().__init__(*chosen)


class LocalGC(ClientPart):
    """Line 14, in the tensors before the borderline that have at least ``min_axes`` axes."""

    recordable: Recordable = "run"

    def __init__(
        self,
        lam: float | None = None,
        boundary: str | None = None,
        rounds: int | None = None,
        min_axes: int = 2,
        lora: bool = False,
    ) -> None:
        self.lam = lam
        self.boundary = boundary
        self.rounds = rounds
        self.min_axes = min_axes
        self.lora = lora
        # reproductions/mean_shapes.py tries other axes
        self.mean_axes: Callable[[int], tuple[int, ...]] = input_axes
        if rounds is not None:
            self.recordable = "stack"

    def bind(self, setup: Setup) -> None:
        trained = set(setup.names)
        names = [name for name in setup.forward_order.names if name in trained]
        chosen = self._before_borderline(setup, names)
        if self.lora:
            chosen = _with_a(setup, names, chosen)
        self.groups = setup.forward_order.groups
        self.axes_of = _axes(setup, chosen, self.min_axes)
        if self.axes_of:
            every = _axes(setup, names, self.min_axes)
            shown = ", ".join(name.removesuffix(".weight") for name in self.axes_of)
            log.info("Local GC in %d of %d tensors: %s", len(self.axes_of), len(every), shown)
        elif self.lam != 0:
            log.warning(
                "there is no Local GC: no trained weight lies before its borderline (gc.boundary,"
                " gc.lam)"
            )

    def _before_borderline(self, setup: Setup, names: list[str]) -> list[str]:
        """Those of the trained tensors ``names`` that come before ``lam`` or ``boundary``."""
        order = setup.forward_order
        if self.lam is not None:
            # 0.29 · 100 is 28.999… in floating point
            return names[: floor(self.lam * len(names) + 1e-9)]
        if self.boundary is None:
            return names
        if self.boundary != "auto":
            return order.before(_place(setup, "boundary", self.boundary))
        log.info(
            "gc.boundary=%s, the last module with a weight: no Local GC from here on",
            order.last_module,
        )
        return order.before(order.place.get(order.last, 0))

    def on_download(self, download: Download) -> None:
        self.is_active = self.rounds is None or download.round_index < self.rounds

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if not self.is_active:
            return
        leaves = pl_module.clients.leaves
        for name, ndim in self.axes_of.items():
            grad = leaves[name].grad  # [n, *shape]
            if grad is not None:
                centralize_(grad, ndim, self.groups.get(name, 0), self.mean_axes(ndim))


class GlobalGC(ServerPart):
    """Line 20, for all modules from ``boundary`` on."""

    def __init__(self, boundary: str | None = None, min_axes: int = 2, lora: bool = False) -> None:
        self.boundary = boundary
        self.min_axes = min_axes
        self.lora = lora
        # reproductions/mean_shapes.py tries other axes
        self.mean_axes: Callable[[int], tuple[int, ...]] = input_axes

    def validate(self, setup: Setup) -> None:
        if self.lora and not isinstance(setup.server_optimizer_probe, SGD):
            raise Refusal("gc.lora=centre_a needs server=sgd: other optimizers move the mean of A.")

    def bind(self, setup: Setup) -> None:
        order = setup.forward_order
        excluded = set(setup.no_steps)  # entries that clients keep are only averaged
        if self.boundary is not None:
            excluded.update(order.before(_place(setup, "server_boundary", self.boundary)))
        names = [name for name in order.names if name not in excluded]
        if self.lora:
            names = _with_a(setup, order.names, names)
        self.groups = order.groups
        self.axes_of = _axes(setup, names, self.min_axes)
        if not self.axes_of:
            log.warning(
                "there is no Global GC: it applies to no trained weight (gc.tensors,"
                " gc.server_boundary)"
            )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        for name, param in pl_module.net.named_parameters():  # type: ignore[union-attr]
            if name in self.axes_of and param.grad is not None:
                ndim = self.axes_of[name]
                centralize_(param.grad, ndim, self.groups.get(name, 0), self.mean_axes(ndim))


def _axes(setup: Setup, names: Iterable[str], min_axes: int) -> dict[str, int]:
    """The parameters among ``names`` that are trained and centralized, with their
    number of axes.
    """
    params = dict(setup.module.net.named_parameters())
    added = setup.forward_order.added if min_axes > 1 else set()
    axes: dict[str, int] = {}
    for name in names:
        param = params[name]
        if param.requires_grad and param.dim() >= min_axes and name not in added:
            axes[name] = param.dim()
    return axes


def _with_a(setup: Setup, names: list[str], chosen: list[str]) -> list[str]:
    """Centres the factors A of adapters. Returns the names of all of them, and those names in
    ``chosen`` that are not of a factor B.
    """
    if not centre_a(setup.module.net):
        raise Refusal("gc.lora=centre_a needs adapters: set model.lora.rank.")
    return [name for name in names if FACTOR_A in name or (name in chosen and FACTOR_B not in name)]


def _place(setup: Setup, key: str, module: str) -> int:
    """The position in the forward pass at which the first parameter of a module is used."""
    net = setup.module.net
    order = setup.forward_order
    name_of = {id(p): name for name, p in order.params.items()}  # a tied parameter has one name
    inside: dict[str, list[str]] = {}  # module → its parameters
    for path, submodule in net.named_modules():
        names = [name_of[id(p)] for p in submodule.parameters()]
        if path and names:
            inside[path] = names
    if module not in inside:
        raise Refusal(
            f"gc.{key}={module!r} names no module of {type(net).__name__} with parameters. There"
            f" are: {', '.join(inside)}. Set gc.{key} to one of them."
        )
    used = set(inside[module]) - set(order.unused)  # peft keeps an unused copy of a trained module
    return min(order.place[name] for name in used or inside[module])
