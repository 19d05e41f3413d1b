"""Networks from elsewhere: torchvision's, timm's, or the user's own. Also what becomes of batch normalisation where
clients have different data, and the checkpoint that any network may start from.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from inspect import signature
from math import gcd
from pathlib import Path
from typing import Any, Literal

import torch
import torchvision
from hydra.utils import get_object
from omegaconf import DictConfig, open_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from gcfed.utils.checked import Count, SettingError, checked
from gcfed.utils.instantiate import build, installed

log = logging.getLogger(__name__)
NormPolicy = Literal["average", "local", "fixed", "group"]


def build_net(cfg: DictConfig) -> nn.Module:
    """The network of ``cfg.model`` under its ``norm_policy``, at its ``start``.

    A network from outside this package receives ``input_shape`` and ``num_classes`` if its constructor names them, and
    is tried on two samples.

    Raises ValueError, which names the key, if it cannot be built, is no network or does not fit the data.
    """
    if cfg.model.get("_target_") is None:
        raise ValueError("model=own: name your network, as in model._target_=mynet.Net.")
    node, target = cfg.model.copy(), str(cfg.model._target_)
    own = not target.startswith("gcfed.")
    shape = {key: node[key] for key in ("input_shape", "num_classes") if key in node}
    with open_dict(node):
        policy, start = node.pop("norm_policy", "average"), node.pop("start", None)
        # Data sets of texts set last_only. A network without it that cannot read texts is refused later.
        optional, known = {"last_only"} & {*node} | ({*shape} if own else set()), set[str]()
        with suppress(Exception):  # building the network raises it again, with a message
            known = {*signature(get_object(target)).parameters}
        for key in optional - known:
            node.pop(key)
    net = build(node)
    if not isinstance(net, nn.Module):
        raise ValueError(f"model._target_={target} makes a {type(net).__name__}, not a torch.nn.Module.")
    try:
        if own and len(shape) == 2:
            net = fitted(net, list(shape["input_shape"]), shape["num_classes"])
        if cfg.get("precision") == "64-true":  # before a checkpoint is read, whose numbers float32 would round
            net = net.double()
        return begin_at(net, start, policy)
    except SettingError as error:
        raise ValueError(f"model.{error}") from None


@checked
def torchvision_net(
    *, name: str | None, input_shape: Sequence[Count], num_classes: Count, weights: str | None = None, **settings: Any
) -> nn.Module:
    """A classifier of ``torchvision.models``; ``settings`` go to its constructor.

    Torchvision's networks read three channels. For other images the first convolution is replaced by a new one.

    Args:
        name: ``resnet18``, ``mobilenet_v3_small``, …; ``torchvision.models.list_models`` lists them.
        weights: ``DEFAULT`` or another name of torchvision's pretrained weights, which it downloads. Tensors of another
            shape, such as the last layer's, start at random, which is logged. None: all start at random.
    """
    try:
        net = torchvision.models.get_model(str(name), num_classes=num_classes, **settings)
    except ValueError as error:
        raise SettingError("name", f"={name}: {error}; torchvision.models.list_models() lists them.") from None
    if weights is not None:
        known = torchvision.models.get_model_weights(str(name)).__members__
        if weights not in known:
            raise SettingError("weights", f"={weights} is unknown: choose null or one of {', '.join(known)}.")
        theirs, ours = known[weights].get_state_dict(check_hash=True), net.state_dict()
        fresh = [key for key, t in ours.items() if key not in theirs or theirs[key].shape != t.shape]
        net.load_state_dict({key: t for key, t in theirs.items() if key in ours and key not in fresh}, strict=False)
        log.info("model: %s start at random, since num_classes or the settings differ", ", ".join(fresh) or "none")
    stem, old = next((n, m) for n, m in net.named_modules() if isinstance(m, nn.Conv2d))
    if len(input_shape) == 3 and input_shape[0] != old.in_channels:
        form: dict[str, Any] = {key: getattr(old, key) for key in ("kernel_size", "stride", "padding")}
        net.set_submodule(stem, nn.Conv2d(input_shape[0], old.out_channels, **form, bias=old.bias is not None))
        log.info("model: %s reads %d channels, not %d, and starts at random", stem, input_shape[0], old.in_channels)
    return fitted(net, input_shape, num_classes)


@checked
def timm_net(
    *, name: str | None, input_shape: Sequence[Count], num_classes: Count, pretrained: bool = False, **settings: Any
) -> nn.Module:
    """A classifier of ``timm``; ``settings`` go to ``timm.create_model``."""
    installed("timm", "model=timm")
    import timm  # seconds

    try:
        net = timm.create_model(
            str(name), in_chans=input_shape[0], num_classes=num_classes, pretrained=pretrained, **settings
        )
    except (RuntimeError, OSError) as error:
        raise SettingError("name", f"={name}: {' '.join(str(error).split())}") from None
    return fitted(net, input_shape, num_classes)


@checked
def fitted(net: nn.Module, input_shape: Sequence[Count], num_classes: Count) -> nn.Module:
    """The network, once it has made ``num_classes`` logits of two samples of this shape; else raises ValueError."""
    what, training = f"model: {type(net).__name__}", net.training
    x = torch.zeros(2, *input_shape, dtype=torch.int64 if hasattr(net, "last_only") else None)
    try:
        with torch.no_grad():
            out = net.eval()(x)
    except Exception as error:
        text = "; for texts it has the attribute last_only" * (x.dim() == 2)
        reason = f"{' '.join(str(error).split())}. Its forward takes one tensor{text}: wrap one that takes several."
        raise ValueError(f"{what} cannot read samples of data.input_shape={[*input_shape]}: {reason}") from error
    net.train(training)
    if not isinstance(out, Tensor):
        raise ValueError(f"{what} returns a {type(out).__name__}: its forward must return one tensor, the logits.")
    if out.dim() < 2 or len(out) != 2 or out.shape[-1] != num_classes:
        raise ValueError(
            f"{what} makes an output of the shape {[*out.shape]} of 2 samples, not one that ends in data.num_classes="
            f"{num_classes}: give its constructor an argument num_classes."
        )
    return net


def batch_norms(net: nn.Module) -> dict[str, Any]:
    """The layers that normalise over the batch, by name."""
    return {n: m for n, m in net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


@checked
def apply_policy(net: nn.Module, norm_policy: NormPolicy = "average") -> nn.Module:
    """The network with its batch normalisation as the policy has it.

    ======== =========================================================================================================
    average  statistics, scales and shifts travel and are averaged like all parameters
    local    each client keeps its own (FedBN, Li et al., ICLR 2021): :class:`~gcfed.methods.local_norm.LocalNorm`
    fixed    statistics, scales and shifts stay as they are, for pretrained networks
    group    GroupNorm in its place, of 32 groups where they divide the channels, two at least in each (Hsieh et al.,
             ICML 2020)
    ======== =========================================================================================================

    Raises SettingError for a policy that the network does not support.
    """
    layers = batch_norms(net)
    if norm_policy != "average" and not layers:
        what = f"={norm_policy}: {type(net).__name__} has no batch normalisation; leave it at average."
        raise SettingError("norm_policy", what)
    for name, layer in layers.items() if norm_policy in ("fixed", "group") else ():
        new: nn.Module
        if norm_policy == "group":
            # A group of one value would be constant: of a vector, or of one channel whose map is a single pixel.
            channels, vectors = layer.num_features, isinstance(layer, nn.BatchNorm1d)
            groups = 1 if vectors else max(1, min(gcd(32, channels), channels // 2))
            new = nn.GroupNorm(groups, layer.num_features, eps=layer.eps, affine=layer.affine)
        elif isinstance(layer, nn.BatchNorm2d) and layer.affine and layer.track_running_stats:
            new = FrozenBatchNorm2d(layer.num_features, eps=layer.eps)
        else:
            what = f"=fixed knows nn.BatchNorm2d alone, and {name} is a {type(layer).__name__}."
            raise SettingError("norm_policy", what)
        new.to(next(net.parameters()).dtype)
        new.load_state_dict({key: t for key, t in layer.state_dict().items() if key in new.state_dict()})
        if hasattr(layer, "act"):  # timm's layers go on with an activation
            new = nn.Sequential(new, layer.drop, layer.act)
        net.set_submodule(name, new)
    return net


@checked
def begin_at(net: nn.Module, start: str | None, norm_policy: NormPolicy = "average") -> nn.Module:
    """The network under a policy, with the tensors of a checkpoint; with its own where ``start`` is None.

    They may be those of the network as it was before the policy, or under it. The path is a part of the run's identity,
    as every setting of the model is.

    Args:
        start: a run's ``last.ckpt`` or ``global_model.safetensors``, or a ``state_dict`` of the network that somebody
            else has written with ``torch.save`` or safetensors. Nothing but tensors is read: no code is run.

    Raises SettingError if the file is damaged or of another network, or as :func:`apply_policy`.
    """
    theirs = {} if start is None else _read_tensors(Path(start))
    if theirs.keys() != net.state_dict().keys():  # there are none, or they are of a network under the policy
        net, norm_policy = apply_policy(net, norm_policy), "average"
    if start is None:
        return net
    try:
        net.load_state_dict(theirs)
    except RuntimeError as error:  # names all tensors that differ
        raise SettingError("start", f"={start} is of another network: {' '.join(str(error).split())}") from None
    return apply_policy(net, norm_policy)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a network in a file, by the names that they have in the network."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever is in the file
        reason = " ".join(str(error).split(". ")[0].split())
        raise SettingError("start", f"={path} holds no tensors that can be read: {reason}") from None
    if "state_dict" in content:  # of Lightning: ours is of a module that has the network as its net
        content = {n.removeprefix("net."): t for n, t in content["state_dict"].items() if n.startswith("net.")}
    return content
