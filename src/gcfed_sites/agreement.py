"""What a site accepts from the server of a config: the numbers that a run needs to agree on.

All other values are the site's own. So the server names no class, file or address, starts no
download, and sets no size of a network and no amount of memory.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gcfed.federated.protocol.uploads import shortened
from gcfed.utils.checked import LARGEST

#: The keys of a config that clients need.
OF_CLIENTS = (
    "data",
    "model",
    "client",
    "gc",
    "attack",
    "quantization",
    "metrics",
    "participation",
    "partition",
    "client_store",
    "task",
    "methods",
    "seed",
    "rounds",
    "eval_every",
    "precision",
    "precision_matmul",
    "channels_last",
    "tags",
    "name",
)
#: Values that may differ between machines: each site keeps its own. The model arrives by message,
#: so its file and its pretrained weights do not matter (frozen weights: ``frozen_checksum``).
OWN = re.compile(
    r"tags|name"
    r"|data\.(dataset\.)?(data_dir|download)|data\.eval_batch_size"
    r"|model\.(start|pretrained|weights)"
    r"|client\.(stack|graphs)|client_store\.folder|metrics\.\w+\.folder"
)
#: Keys whose numbers the server sets.
NUMBERS = re.compile(
    r"seed|rounds|eval_every"
    r"|client\.(epochs|steps|batch_size|lr_decay|lr_cosine|clip_norm)|client\.optimizer\.\w+"
    r"|data\.(seed|rounds|num_clients|limit_train|limit_test)"
    r"|participation\..+|quantization\.bits"
)
#: Keys whose fractions and switches the server sets. Their whole numbers, such as steps of an inner
#: loop, are amounts of work or memory, so both sides must have the same.
FRACTIONS = re.compile(
    r"(methods|gc|attack|quantization|partition|data\.partitioner)\..+"
    r"|data\.(client_test|validation|feature_noise|label_noise|standardize)"
    r"|data\.transform\.(mean|std)|channels_last"
)
#: Sizes that the server sets where the site leaves them open.
OPEN = re.compile(r"data\.(input_shape|num_classes)|model\.vocabulary")
#: Sizes that the site finds in its own data.
FOUND = re.compile(r"model\.(input_shape|num_classes|last_only)")
LARGEST_SIZE = 10**6  # of clients, classes or tokens, or of a sample's axis
LARGEST_WHOLE = 2**63 - 1
SIZES = re.compile(rf"{OPEN.pattern}|data\.num_clients|participation\.num_clients")


def clients_config(whole: Any) -> dict[str, Any]:
    """The part of a resolved config that clients need."""
    return {key: whole[key] for key in OF_CLIENTS if key in whole}


def adopted(own: Any, sent: Any, differing: list[str], key: str = "") -> Any:
    """A site's config, with the server's numbers where the run needs to agree on them.

    Adds each other difference to ``differing``, as a clause that names the key.

    Args:
        own, sent: the values of ``key`` at the site and from the server.
    """
    if OWN.fullmatch(key):
        return own
    if isinstance(own, dict) and isinstance(sent, dict):
        return _adopted_by_key(own, sent, differing, key)
    if own is None and FOUND.fullmatch(key):
        return own
    if _accepts(own, sent, key):
        if _is_bounded(sent, LARGEST_SIZE if SIZES.fullmatch(key) else LARGEST_WHOLE):
            return sent
        differing.append(f"{key}={shortened(sent)} is no possible number")
    elif own != sent:
        differing.append(f"{key} is {_quoted(sent)} there, {_quoted(own)} here")
    return own


def _adopted_by_key(
    own: dict[str, Any], sent: dict[str, Any], differing: list[str], key: str
) -> dict[str, Any]:
    path = f"{key}." if key else ""
    for name in sorted(sent.keys() - own.keys()):
        differing.append(f"{path}{name} is {_quoted(sent[name])} there, absent here")
    values = {}
    for name, value in own.items():
        values[name] = adopted(value, sent.get(name), differing, f"{path}{name}")
    return values


def _quoted(value: Any) -> str:
    return repr(str(value)[:40])


def _accepts(own: Any, sent: Any, key: str) -> bool:
    """Whether the site takes this value of the server's in the place of its own."""
    if not _is_number(sent) or not (own is None or _is_number(own)):
        return False
    if own is not None and isinstance(own, bool) != isinstance(sent, bool):
        return False
    if OPEN.fullmatch(key):
        return own is None
    if NUMBERS.fullmatch(key):
        return True
    if FRACTIONS.fullmatch(key):
        is_fraction = own is not None and not _has_whole(own)
        return is_fraction or not _has_whole(sent)
    return False


def _entries(value: Any) -> Iterator[Any]:
    """The entries of a list and of the lists in it; any other value itself."""
    if not isinstance(value, list):
        yield value
        return
    for entry in value:
        yield from _entries(entry)


def _is_number(value: Any) -> bool:
    """Whether a value is a number, a switch, or a list of them."""
    return all(isinstance(entry, int | float) for entry in _entries(value))


def _has_whole(value: Any) -> bool:
    """Whether a value is a whole number, or a list with one."""
    return any(type(entry) is int for entry in _entries(value))


def _is_bounded(value: Any, most: int) -> bool:
    """Whether a number is finite and not too large."""
    for entry in _entries(value):
        bound = most if isinstance(entry, int) else LARGEST
        if not abs(entry) <= bound:
            return False
    return True


def frozen_checksum(net: nn.Module, travels: tuple[str, ...]) -> str:
    """A checksum of the parameters that no message contains, because nobody trains them; empty if
    there are none.

    Args:
        travels: names of the tensors that messages contain.
    """
    checksum = hashlib.sha256()
    frozen = [(name, p) for name, p in net.named_parameters() if name not in travels]
    for name, p in frozen:
        checksum.update(f"{name} {p.dtype} {[*p.shape]}".encode())
        content = p.detach().cpu().contiguous().view(-1).view(torch.uint8)
        checksum.update(content.numpy().data)
    return checksum.hexdigest() if frozen else ""
