"""What becomes of batch normalisation where the clients' batches differ: ``model.norm_policy``."""

from math import gcd
from typing import Any, Literal

from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from gcfed.utils.checked import SettingError, checked


def batch_norms(net: nn.Module) -> dict[str, Any]:
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
    for name, layer in layers.items() if norm_policy in ("fixed", "group") else ():
        new: nn.Module
        if norm_policy == "group":
            vectors = isinstance(layer, nn.BatchNorm1d)  # of which a group of one would be constant
            groups = 1 if vectors else gcd(32, layer.num_features)
            new = nn.GroupNorm(groups, layer.num_features, eps=layer.eps, affine=layer.affine)
        elif isinstance(layer, nn.BatchNorm2d) and layer.affine and layer.track_running_stats:
            new = FrozenBatchNorm2d(layer.num_features, eps=layer.eps)
        else:
            what = f"=fixed knows nn.BatchNorm2d alone, and {name} is a {type(layer).__name__}."
            raise SettingError("norm_policy", what)
        new.load_state_dict({key: t for key, t in layer.state_dict().items() if key in new.state_dict()})
        if hasattr(layer, "act"):  # timm's layers go on with an activation
            new = nn.Sequential(new, layer.drop, layer.act)
        net.set_submodule(name, new)
    return net
