"""A site may send anything.

The server accepts only tensors of the expected shapes and valid numbers.
"""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_any_upload import accepted, changed, malformed

from gcfed.federated.protocol.messages import Expected, Levels, MessageError, Upload
from gcfed.federated.protocol.packing import pack, unpack
from gcfed.federated.protocol.uploads import upload_content
from gcfed.federated.training.solver import LocalSolver
from gcfed_sites.answers import (
    Answer,
    Limits,
    RoundTask,
    check_versions,
    checked_upload,
    checked_uploads,
    counted_against,
)

SHAPES = {
    "delta": {"w": torch.zeros(2, 3), "b": torch.zeros(2)},
    "control": {"w": torch.zeros(3).double()},
}
EXPECTED = Expected(SHAPES, {"drift": {"": torch.zeros(4)}}, {"w": 3})
ASKED = RoundTask(
    round=3,
    clients=np.array([2, 5]),
    num_samples=np.array([9, 20]),
    num_steps=np.array([2, 3]),
    batch_size=8,
    least_loss=0.0,
    expected=EXPECTED,
)
UPLOAD = upload_content(
    Upload(
        np.array([5, 2]),
        np.array([20, 9]),
        np.array([3, 2]),
        {"w": torch.ones(2, 2, 3), "b": torch.zeros(2, 2)},
        torch.tensor([True, False]),
        3,
        torch.tensor([0.5, torch.nan]),
        np.array([20, 9]),
        {"control": {"w": torch.rand(2, 3).double()}},
        {"w": Levels(3, torch.full((2,), 3.0))},
        notes={"drift": {"": torch.rand(4)}},
    )
)


def test_uploads_of_clients_are_accepted():
    (upload,) = accepted({"uploads": [UPLOAD | {"loss": torch.tensor([0.5, torch.inf])}]}, ASKED)
    assert torch.equal(upload.delta["w"], torch.ones(2, 2, 3))
    assert upload.levels["w"].bits == 3
    assert upload.num_samples.tolist() == [20, 9]


def test_every_malformed_upload_is_refused():
    """Each field is replaced by every kind of value. This upload is quantized and has all fields.

    ``test_any_upload.py`` does the same with the uploads of algorithms.
    """
    answer = unpack(pack({"uploads": [UPLOAD]}))
    assert accepted(answer, ASKED)
    for change in malformed(answer):
        assert accepted(changed(answer, change), ASKED) is None, change


@pytest.mark.parametrize(
    "changes",
    [
        {"num_seen": [25, 9]},
        {"num_seen": [20, 1]},
        {"loss": torch.tensor([0.0, 1e30])},
        {"loss": torch.tensor([0.5, -0.1])},
        {"levels": {"w": -torch.ones(2)}},
    ],
)
def test_impossible_numbers_are_refused(changes):
    assert accepted({"uploads": [UPLOAD | changes]}, ASKED) is None


def test_messages_of_a_site_are_safe_to_print():
    failures = {"a": "did not answer"}
    with counted_against("a", failures):
        message = pack({"failure": "\x1b[2J" + "x" * 600})
        assert Answer("a", 0, message).content(Limits(10_000))
    assert failures["a"] == f"failed:  [2J{'x' * 496}"


@pytest.mark.parametrize(
    "states", [{}, {"c": [0]}, {"c": [0, 4]}, {"c": [0, "1"]}, {"c": [0, 1], "../x": [0, 1]}, None]
)
def test_wrong_versions_of_states_are_refused(states):
    check_versions({"c": [-1, 3]}, ["c"], [5, 2], 3)
    with pytest.raises(MessageError, match="states"):
        check_versions(states, ["c"], [5, 2], 3)


def test_all_clients_that_were_asked_answer_once():
    one = UPLOAD | {"clients": [5, 5]}
    for contents in ([], [UPLOAD, UPLOAD], [one], [UPLOAD] * 3, UPLOAD, None, [[]], [None]):
        with pytest.raises(MessageError, match=r"^(clients|uploads|an upload|num_samples) cannot"):
            checked_uploads(unpack(pack({"uploads": contents}))["uploads"], ASKED)
    (upload,) = checked_uploads([unpack(pack(UPLOAD))], ASKED)
    assert upload.clients.tolist() == [5, 2]


def test_a_long_message_is_refused_before_anything_is_decoded():
    message = pack({"uploads": [UPLOAD, UPLOAD]})
    assert Answer("a", 0, message).content(ASKED.limits)
    long = pack({"uploads": [], "x": torch.zeros(10**4)}), pack({"uploads": [[]] * 10**6})
    for message in (*long, b"", b"\xff" * 9, b"\xff" * 10**5):
        with pytest.raises(MessageError, match=r"is too long|cannot be read"):
            Answer("a", 0, message).content(ASKED.limits)
    for message in long:
        with pytest.raises(MessageError, match=r"a message of [\d,]+ bytes is too long"):
            Answer("a", 0, message).content(ASKED.limits)


def test_a_few_bytes_do_not_become_gigabytes():
    """8 kB of norms and a short payload, for a tensor of 10⁹ quantized numbers."""
    like = {"w": torch.empty(10**9, device="meta")}
    asked = replace(ASKED, expected=Expected({"delta": like}, {}, {"w": 8}))
    sent = UPLOAD | {"extra": {}, "notes": {}}
    tracemalloc.start()
    for norms in (torch.ones(2), torch.ones(2000)):
        for payload in (torch.zeros(2, 1), torch.zeros(2, 10**4), torch.zeros(2000, 1)):
            content = sent | {"levels": {"w": norms}, "delta": {"w": payload.to(torch.uint8)}}
            with pytest.raises(MessageError, match=r"norms of levels|delta is of another model"):
                checked_upload(unpack(pack(content)), asked)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_a_round_of_a_site_with_many_samples_lists_nothing():
    """The most samples that a site may report, in batches of one."""
    solver = LocalSolver(torch.optim.SGD, epochs=2, batch_size=1)
    tracemalloc.start()
    assert solver.num_steps(np.array([10**8])).tolist() == [2 * 10**8]
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()
    for last_batch in ("keep", "drop", "wrap"):
        for batch_size in (1, 4, 7):
            solver = LocalSolver(torch.optim.SGD, batch_size=batch_size, last_batch=last_batch)
            for size in range(1, 20):
                assert solver.batching.count(size) == len(solver.batching.sizes(size))
