"""OmegaConf resolvers of the configs, and the project's folder."""

from pathlib import Path

from omegaconf import OmegaConf

from gcfed.utils.cpu import cores

ROOT = Path(__file__).resolve().parents[3]


def all_devices(accelerator: str) -> int:
    """Processes of ``trainer=ddp``: one a GPU, or one a core where the CPU trains."""
    import torch

    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    return cores()


def last_layer(hidden: list[int] | int | None) -> str | None:
    """The name of the last linear layer behind hidden ones of these widths; None for a model without such widths."""
    if hidden is None or isinstance(hidden, float | str):  # the model refuses them, and says why
        return None
    return "fc2" if isinstance(hidden, int) else f"fc{len(hidden) + 1}"


def length(values: list, times: int = 1) -> int:
    """The number of values, times a factor: the clients that follow from a list of data sets."""
    return len(values) * times


OmegaConf.register_new_resolver("all_devices", all_devices, replace=True)
OmegaConf.register_new_resolver("last_layer", last_layer, replace=True)
OmegaConf.register_new_resolver("length", length, replace=True)
OmegaConf.register_new_resolver("project_root", lambda: str(ROOT), replace=True)
