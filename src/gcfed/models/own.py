"""Networks of torchvision, of timm and of the user; policies for batch normalisation; and the warm
start.
"""

import logging
from collections.abc import Mapping, Sequence, Set
from math import gcd
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gcfed.models.facts import two_zeros
from gcfed.models.unchanged import unchanged
from gcfed.utils.checked import Count, SettingError, checked
from gcfed.utils.instantiate import installed
from gcfed.utils.refusal import Refusal, message_of

log = logging.getLogger(__name__)
#: What stands before all names in a file: nothing, or what our checkpoints, DataParallel,
#: torch.compile and Lightning put there.
PREFIXES = ("", "net.", "module.", "_orig_mod.", "model.")
NormPolicy = Literal["average", "local", "fixed", "group"]


@checked
def torchvision_net(
    *,
    name: str | None,
    input_shape: Sequence[Count],
    num_classes: Count,
    weights: str | None = None,
    **settings: Any,
) -> nn.Module:
    """A classifier of ``torchvision.models``, for images with three channels.

    Args:
        name: ``resnet18``, ``mobilenet_v3_small``, …; ``torchvision.models.list_models`` lists
            them.
        weights: the name of pretrained weights, such as ``DEFAULT``, which torchvision downloads.
            Tensors of another shape, such as the last layer's, start at random; the log names them.
            None: all start at random.
        settings: of its constructor.
    """
    import torchvision  # it imports the compiler

    try:
        net = torchvision.models.get_model(str(name), num_classes=num_classes, **settings)
    except ValueError as error:
        raise SettingError(
            "name", f"={name}: {error}; torchvision.models.list_models() lists them."
        ) from None
    if weights is not None:
        known = torchvision.models.get_model_weights(str(name)).__members__
        if weights not in known:
            raise SettingError(
                "weights", f"={weights} is unknown: choose null or one of {', '.join(known)}."
            )
        _load_fitting(net, known[weights].get_state_dict(check_hash=True))
    return fitted(net, input_shape, num_classes)


def _load_fitting(net: nn.Module, pretrained: Mapping[str, Tensor]) -> None:
    """Loads the tensors that the network has in the same shape. Logs which ones start at random."""
    loaded = {}
    fresh = []
    for key, t in net.state_dict().items():
        if key in pretrained and pretrained[key].shape == t.shape:
            loaded[key] = pretrained[key]
        else:
            fresh.append(key)
    net.load_state_dict(loaded, strict=False)
    log.info(
        "model: %s start at random, since num_classes or the settings differ",
        ", ".join(fresh) or "none",
    )


@checked
def timm_net(
    *,
    name: str | None,
    input_shape: Sequence[Count],
    num_classes: Count,
    pretrained: bool = False,
    **settings: Any,
) -> nn.Module:
    """A classifier of ``timm``; ``settings`` go to ``timm.create_model``."""
    installed("timm", "model=timm")
    import timm  # takes seconds

    settings |= {"in_chans": input_shape[0], "num_classes": num_classes}
    try:
        net = timm.create_model(str(name), pretrained=pretrained, **settings)
    except (RuntimeError, OSError) as error:
        raise SettingError("name", f"={name}: {message_of(error)}") from None
    return fitted(net, input_shape, num_classes)


@checked
def fitted(
    net: nn.Module, input_shape: Sequence[Count], num_classes: Count, x_2: Tensor | None = None
) -> nn.Module:
    """The network, if it returns ``num_classes`` logits for each of two samples; else raises
    Refusal.

    The pass leaves no mark in it, but lazy modules are then complete.

    Args:
        x_2: the samples, ``[2, *input]``; by default zeros.
    """
    what = f"model: {type(net).__name__}"
    x = two_zeros(net, input_shape)
    if x_2 is not None and x_2.dtype == x.dtype:  # other types are refused with the labels
        x = x_2.clone()
    try:
        with unchanged(net), torch.no_grad():
            out = net.eval()(x)
    except Exception as error:
        hint = ""
        if x.dim() == 2 and x.is_floating_point():
            hint = "; a network for texts needs the attribute last_only"
        raise Refusal(
            f"{what} cannot read samples of data.input_shape={[*input_shape]}: {reason(error, x)}."
            f" Its forward takes one tensor{hint}: wrap one that takes several."
        ) from error
    if not isinstance(out, Tensor):
        raise Refusal(
            f"{what} returns a {type(out).__name__}: its forward must return one tensor, the"
            " logits."
        )
    if out.dim() < 2 or len(out) != 2 or out.shape[-1] != num_classes:
        must = (
            f"but the last size must be data.num_classes={num_classes}: give its constructor an"
            " argument num_classes"
        )
        raise Refusal(f"{what} returns the shape {[*out.shape]} for 2 samples, {must}.")
    return net


def reason(error: BaseException, x: Tensor | None = None) -> str:
    """Why a network failed on inputs x, as a sentence without its full stop."""
    first_sentence = message_of(error).split(". ")[0].rstrip(".")
    text = shorten(first_sentence, 300) or type(error).__name__
    if x is None or x.is_floating_point():
        return text
    if isinstance(error, IndexError):
        return (
            f"{text}: a text has {x.shape[-1]} tokens from 0 to {int(x.max())}, which may be more"
            " than its positions or its tokens"
        )
    return text


def batch_norms(net: nn.Module) -> dict[str, Any]:
    """The layers of batch normalisation, by name."""
    kind = nn.modules.batchnorm._BatchNorm
    return {name: module for name, module in net.named_modules() if isinstance(module, kind)}


@checked
def apply_policy(net: nn.Module, norm_policy: NormPolicy) -> nn.Module:
    """The network with this policy for its batch normalisation.

    average: the server averages statistics, scales and shifts like all parameters.
    local: each client keeps its own (FedBN, Li et al., ICLR 2021):
        :class:`~gcfed.methods.personal.local_norm.LocalNorm`.
    fixed: statistics, scales and shifts do not change, for pretrained networks.
    group: GroupNorm replaces it, with at most 32 groups of at least two channels (Hsieh et al.,
        ICML 2020).

    Raises SettingError for a policy that the network does not support.
    """
    layers = batch_norms(net)
    if norm_policy != "average" and not layers:
        name = type(net).__name__
        raise SettingError(
            "norm_policy",
            f"={norm_policy}: {name} has no batch normalisation; leave it at average.",
        )
    if norm_policy in ("average", "local"):
        return net
    for name, layer in layers.items():
        new = _group_norm(layer) if norm_policy == "group" else _fixed_norm(name, layer)
        new.to(next(net.parameters()).dtype)
        kept = new.state_dict().keys()
        new.load_state_dict({key: t for key, t in layer.state_dict().items() if key in kept})
        if hasattr(layer, "act"):  # timm's layers include an activation
            new = nn.Sequential(new, layer.drop, layer.act)
        net.set_submodule(name, new)
    return net


def _group_norm(layer: Any) -> nn.Module:
    """A GroupNorm for the channels of a layer of batch normalisation.

    A group of one value would be constant: one number of a vector, or one channel of a single
    pixel.
    """
    channels = layer.num_features
    groups = 1
    if not isinstance(layer, nn.BatchNorm1d):
        groups = max(1, min(gcd(32, channels), channels // 2))
    return nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)


def _fixed_norm(name: str, layer: Any) -> nn.Module:
    """A layer with the same statistics, scales and shifts, which do not change."""
    if not isinstance(layer, nn.BatchNorm2d) or not layer.affine or not layer.track_running_stats:
        raise SettingError(
            "norm_policy",
            f"=fixed needs nn.BatchNorm2d, and {name} is a {type(layer).__name__}.",
        )
    from torchvision.ops import FrozenBatchNorm2d

    return FrozenBatchNorm2d(layer.num_features, eps=layer.eps)


@checked
def begin_at(net: nn.Module, start: str | None, norm_policy: NormPolicy = "average") -> nn.Module:
    """The network with a policy, and with the tensors of a checkpoint if ``start`` is given.

    The tensors may be those of the network before or after the policy. The path is a part of the
    run's identity.

    Args:
        start: ``last.ckpt``, ``global_model.safetensors``, or a ``state_dict`` of torch or
            safetensors. No code is run.

    Raises SettingError if the file is damaged or of another network, or as :func:`apply_policy`.
    """
    known = net.state_dict().keys()
    theirs = {} if start is None else _read_tensors(Path(start), known)
    if theirs.keys() != known:  # no tensors, or those after the policy
        net = apply_policy(net, norm_policy)
        norm_policy = "average"
    if start is None:
        return net
    try:
        net.load_state_dict(theirs)
    except RuntimeError as error:  # names all tensors that differ
        raise SettingError(
            "start", f"={start} is of another network: {message_of(error)}"
        ) from None
    return apply_policy(net, norm_policy)


def _read_tensors(path: Path, known: Set[str]) -> Mapping[str, Tensor]:
    """The tensors of a file, by their names in the network.

    Args:
        known: the names of the network's tensors.
    """
    if not path.is_file():
        raise SettingError("start", f"={path}: there is no such file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of any type, for a file with any content
        reason = " ".join(str(error).split(". ")[0].split())
        raise SettingError(
            "start", f"={path} holds no tensors that can be read: {reason}"
        ) from None
    if not _has_names(content):
        kind = type(content).__name__
        raise SettingError("start", f"={path} holds a {kind}: save net.state_dict() instead.")
    if _has_names(content.get("state_dict")):
        content = content["state_dict"]
    for prefix in PREFIXES:
        tensors = {
            name.removeprefix(prefix): t for name, t in content.items() if name.startswith(prefix)
        }
        if tensors.keys() & known:
            return tensors
    return content


def _has_names(content: object) -> bool:
    return isinstance(content, Mapping) and all(isinstance(key, str) for key in content)
