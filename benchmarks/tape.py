"""CUDA graphs on a CPU.

Tests use a tape to prove that a step can be a graph, and kernels.py counts kernels with it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gcfed.federated.training.recorder import Step

Operation = tuple[Any, Sequence[Any], dict[str, Any], list[Tensor] | None]
#: Operations that bring a number to the host.
WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "equal",
    "is_nonzero",
)


class Tape(TorchDispatchMode):
    """Records operations on a CPU, with the semantics of a CUDA graph.

    Attributes:
        operations: the last recording: each operation, its arguments, and the tensors that receive
            its results (None if it writes to its arguments).

    Raises:
        RuntimeError: a step waits for the device or takes a number from the host; the message names
            the operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def record(self, step: Step) -> Step:
        operations: list[Operation] = []
        self.operations = operations
        with self:
            step()

        @torch.no_grad()
        def replay() -> None:
            for operation, args, kwargs, results in operations:
                again = operation(*args, **kwargs)
                for result, new in zip(results or (), _tensors(again), strict=False):
                    result.copy_(new)

        return replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        if name in WAITS or (
            name.startswith("index") and any(t.dtype == torch.bool for t in _tensors(args[1:2]))
        ):
            raise RuntimeError(f"a recorded step waits for the device: {name}")
        if name == "lift_fresh":
            raise RuntimeError("a recorded step takes a number from the host: torch.tensor")
        out = func(*args, **kwargs)
        results = _tensors(out)
        if func._schema.is_mutable:
            self.operations.append((func, args, kwargs, None))
        elif not name.startswith(("empty", "new_empty")):
            known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
            # a view needs no copy
            if not any(t.untyped_storage()._cdata in known for t in results):
                self.operations.append((func, args, kwargs, results))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
