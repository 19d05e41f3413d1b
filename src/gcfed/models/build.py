"""Builds the network of a config: its policy for batch normalisation, its start, its adapters."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from inspect import Parameter, signature
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor, nn

from gcfed.models.adapters import with_adapters
from gcfed.models.own import begin_at, fitted
from gcfed.utils.checked import SettingError
from gcfed.utils.instantiate import BuildError, build, takes_any_key, target_of
from gcfed.utils.ours import is_ours
from gcfed.utils.refusal import Refusal


def build_net(cfg: DictConfig, x_2: Tensor | None = None) -> nn.Module:
    """The network of ``cfg.model``, with its ``norm_policy`` and the tensors of its ``start``.

    A network from outside this package gets ``input_shape`` and ``num_classes`` if its constructor
    has these arguments. It must then return ``num_classes`` logits for each of two samples ``x_2``.

    Raises Refusal, with the key, if it cannot be built, is no network or does not match the
    data.
    """
    if cfg.model.get("_target_") is None:
        raise Refusal("model=own: name your network, as in model._target_=mynet.Net.")
    node = cfg.model.copy()
    target = str(cfg.model._target_)
    is_users = not is_ours(target)
    shape = {key: node[key] for key in ("input_shape", "num_classes") if key in node}
    with open_dict(node):
        policy = node.pop("norm_policy", "average")
        start = node.pop("start", None)
        lora: Any = OmegaConf.to_container(node.pop("lora", OmegaConf.create()))
        lora = {key: value for key, value in lora.items() if value is not None}
        arguments: Mapping[str, Parameter] = {}
        with suppress(Exception):  # build() raises it again, with the key
            arguments = signature(target_of(node)).parameters
        # data sets of texts set last_only
        for key in {"last_only", *(shape if is_users else ())} - arguments.keys():
            node.pop(key, None)
    try:
        net = build(node)
    except BuildError as error:
        not_passed = shape.keys() - node.keys()
        if not_passed and takes_any_key(arguments):
            raise BuildError(f"{error}{_unnamed(target, sorted(not_passed))}") from error.__cause__
        raise
    if not isinstance(net, nn.Module):
        raise Refusal(
            f"model._target_={target} makes a {type(net).__name__}, not a torch.nn.Module."
        )
    try:
        if is_users and len(shape) == 2:
            net = fitted(net, list(shape["input_shape"]), shape["num_classes"], x_2)
        # before a checkpoint is read, because float32 would round its numbers
        if cfg.get("precision") == "64-true":
            net = net.double()
        net = begin_at(net, start, policy)
    except SettingError as error:
        raise Refusal(f"model.{error}") from None
    try:
        return with_adapters(net, **lora) if lora else net
    except SettingError as error:
        raise Refusal(f"model.lora.{error}") from None


def _unnamed(target: str, keys: Iterable[str]) -> str:
    """The remedy if a network expects these keys among its ``**kwargs``."""
    return (
        f". {target} has **kwargs, which do not get {' and '.join(keys)} of the data: name those"
        " that the network needs as arguments of its constructor."
    )
