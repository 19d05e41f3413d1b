"""What becomes of batch normalisation where the clients' batches differ: ``model.norm_policy``."""

from math import gcd

from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from gcfed.utils.number import choice

POLICIES = ("average", "local", "fixed", "group")


def batch_norms(net: nn.Module) -> dict[str, nn.Module]:
    """The layers that normalise over the batch, by name."""
    return {n: m for n, m in net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def apply_policy(net: nn.Module, policy: str) -> nn.Module:
    """The network with its batch normalisation as the policy has it.

    ======== =========================================================================================================
    average  statistics, scales and shifts travel and are averaged like all parameters
    local    each client keeps its own (FedBN, Li et al., ICLR 2021): :class:`~gcfed.methods.local_norm.LocalNorm`
    fixed    statistics, scales and shifts stay as they are, for pretrained networks
    group    GroupNorm in its place, of 32 groups where they divide the channels (Hsieh et al., ICML 2020)
    ======== =========================================================================================================

    Raises:
        ValueError: an unknown policy, or one that this network has no use for.
    """
    choice("model.norm_policy", policy, POLICIES)
    layers = batch_norms(net)
    if policy != "average" and not layers:
        raise ValueError(
            f"model.norm_policy={policy}: {type(net).__name__} has no batch normalisation; leave it at average."
        )
    if policy in ("fixed", "group"):
        for name, layer in layers.items():
            net.set_submodule(name, _replaced(name, layer, policy))
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
        raise ValueError(f"model.norm_policy=fixed knows nn.BatchNorm2d alone, and {name} is a {type(layer).__name__}.")
    new.load_state_dict({key: t for key, t in state.items() if key in new.state_dict()})
    # timm's layers go on with an activation.
    return nn.Sequential(new, layer.drop, layer.act) if hasattr(layer, "act") else new  # type: ignore[arg-type]
