"""Finds out whether a network gives the same numbers on a client's own tensors, with padding, and
in a stack of several clients.

Most functions return a reason why clients cannot train in one stack; it is empty if they can.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import vmap

from gcfed.federated.network.lent_network import travelling
from gcfed.federated.network.probing.closeness import are_close, is_close
from gcfed.federated.network.probing.passes import Pass, Passes, grads_of
from gcfed.federated.network.tap import Tap
from gcfed.federated.protocol.messages import Params
from gcfed.models.own import reason
from gcfed.models.snapshot import HOOKS
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import seed_generators


def _comparable(passes: Passes) -> bool:
    """Whether passes are compared in training mode.

    Dropout draws other masks in a stack, so it is compared in evaluation mode.
    """
    return "torch" not in passes.draws


def differs_on_other_tensors(passes: Passes) -> str:
    """Why a client's numbers differ in a call on other tensors."""
    count = len(passes.x)
    state = passes.scaled(passes.before, 1.1)
    alone = passes.run(passes.x, _comparable(passes), passes.y, state, count)
    tap = Tap(passes.net)

    def outputs(state: Params) -> Tensor:
        (logits, *_), _ = tap.on(state, passes.x)
        return logits.unsqueeze(0)

    def loss(out_KB: Tensor) -> Tensor:
        return passes.loss(out_KB, passes.x[None], passes.y[None], [count])

    expected = [alone.out.unsqueeze(0), *alone.grads]
    differs = _differs(passes, outputs, state, loss, expected)
    if differs or _has_hooks_on_gradients(passes.net):
        return (
            "weights that forward reaches other than through its modules (lists, closures, hooks)"
        )
    return ""


def samples_interact(passes: Passes) -> str:
    """Why the samples of a batch influence each other; compares half of the samples with the same
    and padding, which repeats the first sample.
    """
    half = max(1, len(passes.x) // 2)
    x = passes.x.clone()
    y = passes.y.clone()
    x[half:] = x[:1]
    y[half:] = y[:1]
    padded = passes.run(x, y=y, num_real=half)
    size = len(x) if passes.draws else half  # random draws depend on the size of a batch
    alone = passes.run(passes.x[:size], y=passes.y[:size], num_real=half)
    if _padding_changes_nothing(padded, alone, half):
        return ""
    return (
        "batches whose samples influence each other, as in batch statistics or in a loss that"
        " counts labels, which would mix with padding"
    )


def refuse_shared_memory(passes: Passes) -> None:
    """Refuses a network whose output on changed weights depends on the way they change: in its own
    memory, or as tensors that are lent to it.
    """
    passes.begin_anew()  # calls on other tensors may have reached buffers through a list
    lent = passes.run(passes.x, start=passes.scaled(passes.before, 1.1))
    for name in passes.trained:  # weights that share memory change twice
        passes.lent_network.tensors[name].data.mul_(1.1)
    if not is_close(passes.run(passes.x, start={}).out, lent.out):
        raise Refusal(
            f"{passes.name} keeps a weight's memory in another tensor (self.b ="
            " self.a.weight.t() or .data in __init__), but clients' weights have other memory:"
            " use self.a.weight in forward."
        )


def draws_for_all(passes: Passes) -> str:
    """Why clients would share random numbers: a stack would draw once for all of them."""
    if {"numpy", "python"} & passes.draws:
        return "random numbers of NumPy or Python, drawn once for all of a stack"
    return ""


def differs_in_stacks(passes: Passes, averaged: Sequence[str]) -> str:
    """Why the numbers of two clients differ in a stack.

    Args:
        averaged: the constants that training changes.
    """
    x_KB = torch.stack([passes.x, passes.x.flip(0)])
    y_KB = torch.stack([passes.y, passes.y.flip(0)])
    counts = [len(passes.x), max(1, len(passes.x) // 2)]  # the second client has padding
    states = [passes.scaled(passes.before, factor) for factor in (1.1, 1.2)]
    numbers = []
    for k, state in enumerate(states):
        alone = passes.run(x_KB[k], _comparable(passes), y_KB[k], state, counts[k])
        numbers.append([alone.out, *alone.grads])
        del alone  # the memory of a model
    expected = [torch.stack(pair) for pair in zip(*numbers, strict=True)]
    shared = _shared_tensors(passes, averaged)
    stacked = {}
    for name in passes.before:
        if name not in shared:
            stacked[name] = torch.stack([state[name] for state in states])
    del states, numbers  # the memory of eight models
    call = vmap(Tap(passes.net).on, randomness="different")

    def outputs(state: Params) -> Tensor:
        (logits, *_), _ = call(state, x_KB)
        return logits

    def loss(out_KB: Tensor) -> Tensor:
        return passes.loss(out_KB, x_KB, y_KB, counts)

    differs = _differs(passes, outputs, stacked, loss, expected)
    if draws_for_all(passes):
        return draws_for_all(passes)
    return differs and f"a forward that torch.func.vmap cannot batch ({differs})"


def _differs(
    passes: Passes,
    outputs: Callable[[Params], Tensor],
    state: Params,
    loss: Callable[[Tensor], Tensor],
    expected: Sequence[Tensor],
) -> str:
    """How outputs and gradients on these tensors differ from those of passes in the network."""
    try:
        for training in dict.fromkeys((True, _comparable(passes))):  # the last one is compared
            seed_generators(passes.x.device, 0)
            passes.net.train(training)
            leaves = {}
            for name, t in state.items():
                leaves[name] = t.clone().requires_grad_(name in passes.trained)
            out_KB = outputs(leaves)
            returned = out_KB.detach().clone()  # a loss may edit it
            loss(out_KB).backward()
    except Exception as error:
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {reason(cause)}"
    found = [returned, *grads_of([leaves[name] for name in passes.trained])]
    return "" if are_close(found, expected) else "other outputs or gradients"


def _shared_tensors(passes: Passes, averaged: Sequence[str]) -> set[str]:
    """Names of the tensors that all clients of a stack share."""
    parameters = {name for name, _ in passes.net.named_parameters()}
    return set(passes.lent_network.saved) - parameters - {*travelling(passes.net)} - {*averaged}


def _has_hooks_on_gradients(net: nn.Module) -> bool:
    """Whether a parameter has hooks, which a call on other tensors does not reach."""
    for parameter in net.parameters():
        if any(getattr(parameter, kind, None) for kind in HOOKS):
            return True
    return False


def _padding_changes_nothing(padded: Pass, alone: Pass, half: int) -> bool:
    """Whether two passes agree in tensors, gradients, and outputs of the first ``half`` samples."""
    for name in padded.changed:
        if not is_close(padded.tensors[name], alone.tensors[name]):
            return False
    return are_close([padded.out[:half], *padded.grads], [alone.out[:half], *alone.grads])
