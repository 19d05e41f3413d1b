"""Says in one line whose code has failed.

An error of the user's code keeps its type, its message and its traceback. The line follows as a
note (``BaseException.add_note``), so it is the last one on the screen and in ``failure.txt``.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightning.pytorch import Callback
from torch import nn

from gcfed.tasks import Task
from gcfed.utils.ours import is_ours

#: Our functions that use what the user's code returns, and what has failed if they fail.
OURS = {
    "ClientStack.__call__": "model: {net} fails",
    "LoneClient.mean_loss": "model or task: {net} with {task} fails",
    "LoneClient.gradients": "model or task: the backward pass of {net} and {task} fails",
    "ClientStack.backward": "model or task: the backward pass of {net} and {task} fails",
    "Passes.run": "model or task: the backward pass of {net} and {task} fails",
    "LocalSolver.train": "model or task: local training of {net} with {task} fails",
    "FederatedModule.validation_step": "task={task} or model: the test of {net} fails",
}


@contextmanager
def blamed(net: nn.Module, task: Task, when: str) -> Iterator[None]:
    """Adds a line to an error of the block that names the network, the task or another part.

    Args:
        when: the end of the line, such as ``in round 3``.
    """
    try:
        yield
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        frames.reverse()  # the innermost first
        if not (hasattr(error, "__notes__") or _names_its_cause(error, frames)):
            culprit = _by_object(frames, net, task) or _by_engine(frames, net, task)
            if culprit:
                error.add_note(f"{culprit} {when}.")
        raise


def _names_its_cause(error: Exception, frames: list[FrameType]) -> bool:
    """Whether the error names a file, or is a refusal of ours, which names a key."""
    if isinstance(error, OSError) and error.filename is not None:
        return True
    return isinstance(error, ValueError) and is_ours(frames[0].f_globals.get("__name__"))


def _by_object(frames: list[FrameType], net: nn.Module, task: Task) -> str:
    """The failing part of the run, by the object of the innermost method."""
    modules = {id(module) for module in net.modules()}
    for frame in frames:
        owner = frame.f_locals.get("self")
        if id(owner) in modules:
            return f"model: {type(net).__name__} fails"
        if owner is task and is_ours(type(task).__module__):
            name = type(task).__name__
            return f"model: task={name} fails on the outputs of {type(net).__name__}"
        if owner is task:
            return f"task={type(task).__name__} fails"
        if isinstance(owner, Callback) and not is_ours(type(owner).__module__):
            function = f"{type(owner).__name__}.{frame.f_code.co_name}"
            return f"methods, metrics or callbacks: {function} fails"
    return ""


def _by_engine(frames: list[FrameType], net: nn.Module, task: Task) -> str:
    """The failing part of the run, by the innermost function of :data:`OURS`."""
    for frame in frames:
        text = OURS.get(frame.f_code.co_qualname)
        if text and is_ours(frame.f_globals.get("__name__")):
            return text.format(net=type(net).__name__, task=type(task).__name__)
    return ""
