"""What becomes of batch normalisation where the clients' batches differ: ``model.norm_policy``."""

from math import gcd
from typing import Literal

from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from gcfed.utils.checked import SettingError, checked


def batch_norms(net: nn.Module) -> dict[str, nn.Module]:
    """The layers that normalise over the batch, by name."""
    return {n: m for n, m in net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


@checked
def apply_policy(net: nn.Module, norm_policy: Literal["average", "local", "fixed", "group"] = "average") -> nn.Module:
    """The network with its batch normalisation as the policy has it.

    ======== =========================================================================================================
    average  statistics, scales and shifts travel and are averaged like all parameters
    local    each client keeps its own (FedBN, Li et al., ICLR 2021): :class:`~gcfed.methods.local_norm.LocalNorm`
    fixed    statistics, scales and shifts stay as they are, for pretrained networks
    group    GroupNorm in its place, of 32 groups where they divide the channels (Hsieh et al., ICML 2020)
    ======== =========================================================================================================

    Raises:
        SettingError: a policy that this network has no use for.
    """
    layers = batch_norms(net)
    if norm_policy != "average" and not layers:
        what = f"={norm_policy}: {type(net).__name__} has no batch normalisation; leave it at average."
        raise SettingError("norm_policy", what)
    if norm_policy in ("fixed", "group"):
        for name, layer in layers.items():
            net.set_submodule(name, _replaced(name, layer, norm_policy))
    return net


def _replaced(name: str, layer: nn.Module, policy: str) -> nn.Module:
    channels: int = layer.num_features  # type: ignore[assignment]
    state = layer.state_dict()
    new: nn.Module
    if policy == "group":
        groups = 1 if isinstance(layer, nn.BatchNorm1d) else gcd(32, channels)  # of vectors: a group of one is constant
        new = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)  # type: ignore[arg-type]
    elif isinstance(layer, nn.BatchNorm2d) and layer.affine and layer.track_running_stats:
        new = FrozenBatchNorm2d(channels, eps=layer.eps)
    else:
        what = f"=fixed knows nn.BatchNorm2d alone, and {name} is a {type(layer).__name__}."
        raise SettingError("norm_policy", what)
    new.load_state_dict({key: t for key, t in state.items() if key in new.state_dict()})
    # timm's layers go on with an activation.
    return nn.Sequential(new, layer.drop, layer.act) if hasattr(layer, "act") else new  # type: ignore[arg-type]
