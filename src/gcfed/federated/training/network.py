"""Which tensors of a network server and clients exchange."""

from collections.abc import Sequence

from torch import nn

from gcfed.federated.training.forward import Params


def travelling(net: nn.Module) -> tuple[str, ...]:
    """Names of the tensors that server and clients exchange: trained parameters and finite floating-point buffers.

    Frozen parameters, integers and masks of −∞ are constants. If a forward pass changes one, the probe finds it
    (:mod:`gcfed.federated.training.probe`). A buffer with ``persistent=False`` starts again each round.
    """
    kept = net.state_dict(keep_vars=True)
    params = [name for name, p in net.named_parameters() if p.requires_grad]
    floats = [name for name, b in net.named_buffers() if name in kept and b.is_floating_point()]
    buffers = [name for name in floats if bool(kept[name].isfinite().all())]
    return (*params, *buffers)


def broadcast_state(net: nn.Module, names: Sequence[str] | None = None) -> Params:
    """Copies of these tensors, by default of all that travel, name → ``[*shape]``; integers as float32."""
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    chosen = {name: tensors[name].detach() for name in names or travelling(net)}
    return {name: t.clone() if t.is_floating_point() else t.float() for name, t in chosen.items()}
