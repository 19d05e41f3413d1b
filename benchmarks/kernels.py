"""How many kernels a local step of the CNN launches on a GPU, by algorithm: ``python
benchmarks/kernels.py``.

It runs on a CPU: it records the operations of a step and applies rules for what each launches on a
GPU. Views and allocations launch nothing, a convolution adds its bias by a separate kernel, and a
``_foreach`` operation is one kernel if all its tensors have the same layout. It prints the table of
docs/performance.md.
"""

import io
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.tape import Operation, Tape  # noqa: E402
from gcfed.api import configure  # noqa: E402
from gcfed.federated.training.memory import TrainingMemory  # noqa: E402
from gcfed.run import train  # noqa: E402

ALGORITHMS = sorted(path.stem for path in (ROOT / "configs/algorithm").glob("*.yaml"))
SMALL = (
    "model=cnn",
    "participation=uniform",
    "participation.num_clients=5",
    "participation.per_round=5",
    "rounds=2",
    "client.epochs=3",
    "client.batch_size=8",
    "partition=iid",
    "data.limit_train=80",
    "data.limit_test=10",
    "extras.figures=false",
    "trainer=cpu",
    "trainer.devices=1",
    "logger=none",
)
#: Operations that launch nothing, and those that launch two kernels.
FREE = (
    "_unsafe_view",
    "_reshape_alias",
    "detach",
    "alias",
    "lift_fresh",
    "empty",
    "empty_like",
    "empty_strided",
)
TWO = ("max_pool2d_with_indices_backward", "nll_loss_backward")


def kernels(operation: Operation) -> int:
    """Kernels of one operation."""
    func, args, _, _ = operation
    name = func._schema.name.removeprefix("aten::")
    if name in FREE or func.is_view:
        return 0
    if name == "convolution":
        return 1 + (args[2] is not None)
    if name == "convolution_backward":  # by input, by weight, by bias
        return sum(map(bool, args[-1]))
    if name.startswith("_foreach"):
        lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
        alike = all(
            _layout(t) == _layout(u)
            for other in lists[1:]
            for t, u in zip(lists[0], other, strict=False)
        )
        return 1 if alike else len(lists[0])
    return 2 if name in TWO else 1


def _layout(tensor: Tensor) -> list[tuple[int, int]]:
    return [
        (size, stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1
    ]


def count(algorithm: str, stack: int, *overrides: str) -> int:
    """Kernels of a step of ``stack`` clients: the maximum over the recorded steps."""
    tapes: list[Any] = []

    class Counter(Tape):
        def record(self, step: Any) -> Any:
            replay = super().record(step)
            tapes.append(sum(map(kernels, self.operations)))
            return replay

    with tempfile.TemporaryDirectory() as folder:
        cfg = configure(
            f"algorithm={algorithm}",
            "gc=gcfed",
            f"client.stack={stack}",
            *SMALL,
            *overrides,
            folder=f"{folder}/run",
        )
        counter = Counter()
        before = TrainingMemory.recorder
        TrainingMemory.recorder = lambda memory: counter  # type: ignore[method-assign]
        try:
            with redirect_stdout(io.StringIO()):  # the run's own summary
                train(cfg)
        finally:
            TrainingMemory.recorder = before  # type: ignore[method-assign]
    return max(tapes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| algorithm | alone | five in a stack |\n|---|---|---|")
    for name in sys.argv[1:] or ALGORITHMS:
        print(f"| {name} | {count(name, 1)} | {count(name, 5)} |", flush=True)
