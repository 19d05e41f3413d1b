"""A site may send anything.

The server accepts only tensors of the expected shapes and valid numbers.
"""

import numpy as np
import pytest
import torch

from gcfed.federated.engine.wire import pack, unpack, upload_content
from gcfed.federated.protocol.messages import Expected, Levels, MessageError, Upload
from gcfed.federated.training.solver import LocalSolver
from gcfed_sites.answers import Answer, check_versions, checked_upload, counted_against

SHAPES = {
    "delta": {"w": torch.zeros(2, 3), "b": torch.zeros(2)},
    "control": {"w": torch.zeros(3).double()},
}
EXPECTED = Expected(SHAPES, {"drift": {"": torch.zeros(4)}})
SIZES = np.array([0, 0, 9, 0, 0, 20])  # in batches of 8, clients 2 and 5 have 2 and 3 steps
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


def read(changes):
    content = unpack(
        pack({key: value for key, value in (UPLOAD | changes).items() if value is not None})
    )
    return checked_upload(
        content, 3, EXPECTED, SIZES, LocalSolver(torch.optim.SGD, epochs=1, batch_size=8)
    )


def test_uploads_of_clients_are_accepted():
    upload = read({"loss": torch.tensor([0.5, torch.inf])})
    assert torch.equal(upload.delta["w"], torch.ones(2, 2, 3))
    assert upload.levels["w"].bits == 3
    assert upload.num_samples.tolist() == [20, 9]


@pytest.mark.parametrize(
    "changes",
    [
        {"round": 2},
        {"clients": [5, 99]},
        {"clients": 5},
        {"clients": ["x", 2]},
        {"clients": [[5, 2]]},
        {"num_samples": [20, 2**62]},
        {"num_samples": [20]},
        {"num_steps": [3, 3]},
        {"num_steps": [3, -1]},
        {"num_seen": [25, 9]},
        {"num_seen": None},
        {"loss": torch.tensor([0.0, 1e30])},
        {"loss": torch.zeros(3)},
        {"loss": None},
        {"finite": torch.ones(2)},
        {"finite": torch.ones(3).bool()},
        {"delta": UPLOAD["delta"] | {"b": torch.zeros(2, 3)}},
        {"delta": UPLOAD["delta"] | {"b": torch.zeros(2, 2).int()}},
        {"delta": UPLOAD["delta"] | {"b": 1.0}},
        {"delta": UPLOAD["delta"] | {"x": torch.zeros(2)}},
        {"delta": {"w": UPLOAD["delta"]["w"]}},
        {"delta": UPLOAD["delta"] | {"w": torch.ones(2, 2, 3)}},
        {"levels": {}},
        {"levels": {"w": [10**9, torch.ones(2)]}},
        {"levels": {"b": [3, torch.ones(2)]}},
        {"packed": {"b": "8"}},
        {"packed": {"b": 25}},
        {"packed": {"x": 1}},
        {"packed": None},
        {"extra": {}},
        {"extra": UPLOAD["extra"] | {"x": {"y": torch.zeros(2)}}},
        {"notes": {}},
        {"notes": {"drift": {"": torch.zeros(5)}}},
        {"evil": 1},
    ],
)
def test_invalid_uploads_are_refused(changes):
    failures = {"a": "did not answer"}
    with counted_against("a", failures):
        read(changes)
    assert failures["a"].startswith("failed: ")


def test_messages_of_a_site_are_safe_to_print():
    failures = {"a": "did not answer"}
    with counted_against("a", failures):
        assert Answer("a", 0, pack({"failure": "\x1b[2J" + "x" * 600})).content
    assert failures["a"] == f"failed:  [2J{'x' * 496}"


@pytest.mark.parametrize(
    "states", [{}, {"c": [0]}, {"c": [0, 4]}, {"c": [0, "1"]}, {"c": [0, 1], "../x": [0, 1]}, None]
)
def test_wrong_versions_of_states_are_refused(states):
    check_versions({"c": [-1, 3]}, ["c"], [5, 2], 3)
    with pytest.raises(MessageError, match="states"):
        check_versions(states, ["c"], [5, 2], 3)
