"""Warm start: the global model begins at the weights of a checkpoint, ``model.start=<file>``."""

import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gcfed.utils.checked import SettingError, checked


@checked
def begin_at(net: nn.Module, start: str | None) -> nn.Module:
    """The network with the tensors of a checkpoint; with its own where ``start`` is None.

    The path is a part of the run's identity, as every setting of the model is.

    Args:
        start: a run's ``last.ckpt`` or ``global_model.safetensors``, or a ``state_dict`` of the network that somebody
            else has written with ``torch.save`` or safetensors. Nothing but tensors is read: no code is run.

    Raises:
        FileNotFoundError: there is no such file.
        SettingError: it is damaged, or of another network; names the first tensor that does not fit.
    """
    if start is None:
        return net
    theirs, ours, kind = read_tensors(start), net.state_dict(), type(net).__name__
    for name in [*ours, *theirs]:
        there, here = ([*state[name].shape] if name in state else "missing" for state in (theirs, ours))
        if there != here:
            what = f"{name} is {there} there, and {here} in {kind}"
            raise SettingError("start", f"={start} is of another network: {what}.")
    net.load_state_dict(theirs)
    return net


def read_tensors(start: str) -> dict[str, Tensor]:
    """The tensors of a network in a file, by the names that they have in the network."""
    path = Path(start)
    if not path.is_file():
        raise FileNotFoundError(f"model.start={start}: there is no such file; give a run's checkpoints/last.ckpt.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with zipfile.ZipFile(path) as archive:  # torch writes the checksums, and reads past them
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} is wrong")
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
        if "state_dict" in content:  # of Lightning: ours is of a module that has the network as its net
            content = {n.removeprefix("net."): t for n, t in content["state_dict"].items() if n.startswith("net.")}
        if not all(isinstance(t, Tensor) for t in content.values()):
            raise ValueError("it holds more than tensors")
    except Exception as error:  # whatever is in the file
        raise SettingError(
            "start", f"={start} holds no tensors that can be read: {' '.join(str(error).split('. ')[0].split())}"
        ) from None
    return content
