"""Networks as people write them: a run equals ten lines of plain PyTorch, or gives a reason why it
does not.

Each network trains GC-Fed for two rounds of three local steps with full batches: with one client,
and with a stack of three clients (``client.stack=3``), which have 5, 8 and 11 samples.
"""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from users_networks import SIZES, load, normalised
from users_plain import PLAIN, find, fresh, plain, run

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecated and slow operations
EQUAL = "equal"  # equal to plain PyTorch; a refusal fails the test
ALONE = r"client\.stack=1"  # equal, or refused or trained one by one with this message

# The network, and the expected results of one client and of three in a stack. A pattern allows a
# refusal or other numbers if the error or the log matches it. None: not compared, for the reason in
# the comment. Networks that write no state and are equal in a stack need no run with one client.
# What is refused with one client is refused in a stack.
NETWORKS = {
    # inputs and outputs
    "InPlace": (None, EQUAL),
    "ViewAfterConv": (None, EQUAL),
    "GradientByInput": (EQUAL, ALONE),
    # buffers
    "RunningMean": (EQUAL, ALONE),
    "AssignedBuffer": (EQUAL, ALONE),
    "ChangesPlaces": (EQUAL, ALONE),
    "KeepsPrevious": (EQUAL, ALONE),
    "UnsavedBuffer": ("average", None),
    "BufferInList": (EQUAL, ALONE),
    "MeanForTests": (EQUAL, ALONE),
    "StepCounter": ("warmup", None),  # the engine decides how to combine the clients' counters
    "SeldomChanged": ("flag", ALONE),
    "WritesAnew": (EQUAL, EQUAL),
    "Grows": (r"the shape of rows", None),
    "TurningComplex": (r"phase.*view_as_real", "phase"),
    "IndexFirst": (None, EQUAL),
    # parameters used outside of their modules
    "SparseTable": ("sparse=False", None),
    "OwnParameters": ("requires_grad", None),
    "WeightInList": (EQUAL, ALONE),
    "Penalty": (EQUAL, ALONE),
    "ForwardHook": (EQUAL, ALONE),
    "GradientHook": (EQUAL, ALONE),
    "AccumulatedHook": (EQUAL, ALONE),
    "Scripted": (EQUAL, ALONE),
    "Checkpointed": (EQUAL, ALONE),
    "CheckpointedReentrant": (EQUAL, ALONE),
    "Clamped": (EQUAL, EQUAL),
    "Tied": (None, EQUAL),
    "SharedModule": (None, EQUAL),
    "TiedInForward": (r"fc3\.weight other memory.*tie it in __init__", None),
    "LayerDrop": (EQUAL, ALONE),
    "EarlyExit": (EQUAL, ALONE),
    "Spare": (None, EQUAL),
    # state in attributes
    "Counter": (EQUAL, "calls"),  # the clients share the count
    "CountsInList": ("means", ALONE),
    "LastOutputs": ("outputs", "attribute"),
    "LastOutputsInPlace": ("attribute", None),
    "Lock": (None, EQUAL),
    "KeepsHidden": (EQUAL, ALONE),
    "Teacher": (EQUAL, ALONE),
    "TeacherByData": (EQUAL, ALONE),
    "TorchRandom": (EQUAL, None),  # a stack draws for all its clients at once
    "OwnGenerator": (EQUAL, "generator"),  # as Counter
    # initialised by their first batch
    "ActNorm": (EQUAL, ALONE),
    "CodeBook": (EQUAL, ALONE),
    "MeanOfFirst": (EQUAL, ALONE),
    "LayerOfForward": (r"makes the parameter late\.bias, late\.weight in forward", None),
    # torch's layers
    "batch_norm": (EQUAL, ALONE),
    "batch_norm_cumulative": (EQUAL, None),  # as StepCounter
    "OwnBatchNorm": (EQUAL, ALONE),
    "group_norm": (None, EQUAL),
    "instance_norm": (None, EQUAL),
    "weight_normalised": (None, EQUAL),
    # the mean of the unit vectors is repaired (test_users_runs.py)
    "spectrally_normalised": (EQUAL, None),
    "transposed": (None, EQUAL),
    "sequence_first": (EQUAL, ALONE),  # its layer has the batch on axis 1, so samples meet
    "TwoAndThreeAxes": (None, EQUAL),
    "VisionTransformer": (None, EQUAL),
    "Recurrent": (EQUAL, ALONE),
    "lazy": (None, EQUAL),
    "dropout": (EQUAL, None),  # as TorchRandom
    "DoubleInside": (None, EQUAL),
}


def compare(result, name, clients):
    """Weights, buffers and the last test equal those of the plain loop."""
    dtype, atol = (torch.float32, 1e-6) if name == "DoubleInside" else (torch.float64, 1e-10)
    data = load(clients, images=getattr(find(name), "images", False))
    x, x_test = (torch.from_numpy(data[key]).to(dtype) for key in ("x", "x_test"))
    x, x_test = (normalised(t) if t.dim() == 4 else t for t in (x, x_test))
    y, y_test = (torch.from_numpy(data[key]) for key in ("y", "y_test"))
    parts = np.split(np.arange(len(y)), np.cumsum(SIZES[clients])[:-1])
    net = plain(lambda: fresh(name), x, y, parts, x_test, gc=True)
    logits = net(x_test)
    state = result.module.net.state_dict()
    assert state.keys() == net.state_dict().keys()
    for n, value in net.state_dict().items():
        if value.is_floating_point() or clients == 1:
            torch.testing.assert_close(
                state[n], value, rtol=0, atol=atol, msg=lambda msg, n=n: f"{n}: {msg}"
            )
    accuracy = (logits.argmax(1) == y_test).double().mean().item()
    loss = F.cross_entropy(logits, y_test).item()
    assert [result.metrics["test/acc"], result.metrics["test/loss"]] == pytest.approx(
        [accuracy, loss], abs=10 * atol
    )


@pytest.mark.parametrize(
    ("name", "clients"),
    [(n, c) for n, both in NETWORKS.items() for c, e in zip((1, 3), both, strict=True) if e],
)
def test_a_network_trains_as_with_plain_pytorch(config, tmp_path, caplog, name, clients):
    expected = NETWORKS[name][clients > 1]
    said = ""
    with caplog.at_level("INFO"):
        try:
            words = (
                "gc=gcfed",
                "gc.boundary=head",
                f"precision={32 if name == 'DoubleInside' else 64}-true",
            )
            words += (f"client.stack={clients}",)
            result = run(config, tmp_path / "run", name, *words, clients=clients, whole=False)
        except ValueError as error:
            result = None
            said = str(error)
    named = expected != EQUAL and re.search(expected, f"{said} {caplog.text}")
    assert result or named, said
    if result and (not named or expected == ALONE):
        compare(result, name, clients)


@pytest.mark.parametrize("name", ["TwoInputs", "TupleOutput"])
def test_a_network_that_cannot_be_trained_is_refused_with_a_wrapper(config, tmp_path, name):
    with pytest.raises(ValueError, match=rf"(?s){name}.*forward"):
        run(config, tmp_path, name, *PLAIN)
