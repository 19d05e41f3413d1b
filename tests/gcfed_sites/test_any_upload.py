"""Every number that a site sends is bounded by what was asked of it.

Each field of an honest answer is replaced by every kind of value. Then the site is left out, the
server's model is that of a run without it, and no exception ends the run.
"""

import csv
import random
import tracemalloc
from copy import deepcopy

import pytest
import torch
from conftest import read_rows
from harness import final_weights
from test_sites import ALL, CLIENTS_OF_B, garbled_by, survivors
from test_sites import federated as federated  # a fixture
from test_sites import simulated as simulated  # a fixture

from gcfed.federated.protocol.packing import pack
from gcfed.federated.protocol.uploads import REAL
from gcfed_sites import answers
from gcfed_sites.answers import Answer, checked_uploads, counted_against

ALGORITHMS = ("fedavg", "fednova", "scaffold", "fedpaq", "topk", "ssf", "fedgc")
PLAIN = (None, True, 0, -1, 2**62, 2**70, 0.5, float("nan"), float("inf"), "x", [], {}, [[]])
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
)
LENGTHS = (0, 1, 10**3)
NESTED = {"a": [[{"b": torch.zeros(1)}] * 3] * 3}


def nodes(tree, path=()):
    """The path of each node of an answer, and the node."""
    yield path, tree
    children = tree.items() if isinstance(tree, dict) else ()
    if isinstance(tree, list):
        children = enumerate(tree[:1])
    for key, child in children:
        yield from nodes(child, (*path, key))


def replaced(tree, path, value):
    """A copy of an answer with another node at this path."""
    tree = deepcopy(tree)
    if not path:
        return value
    place = tree
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return tree


def without(tree, path):
    """A copy of an answer that lacks the node at this path."""
    tree = deepcopy(tree)
    place = tree
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return tree


def other_tensors(t):
    """Tensors of other types and shapes."""
    for dtype in DTYPES:
        yield t.to(torch.float32).nan_to_num(0.0).to(dtype)
    for length in LENGTHS:
        yield torch.zeros(length, *t.shape[1:], dtype=t.dtype)
        yield torch.zeros(*t.shape, length, dtype=t.dtype)
    yield t.unsqueeze(0)
    yield t.flatten()
    yield t[..., :0] if t.dim() else t.unsqueeze(0)
    yield t.new_zeros(())


def other_nodes(node):
    """What may stand in the place of a node: plain values, nested junk, and changes of the node."""
    yield from PLAIN
    yield NESTED
    yield torch.zeros(2)
    if isinstance(node, torch.Tensor):
        yield from other_tensors(node)
    if isinstance(node, dict):
        yield node | {"evil": 1}
        yield node | {"evil": torch.zeros(2)}
    if isinstance(node, list):
        yield [*node, *node, *node]
        yield node[:-1]
        yield [node]
    if type(node) is int:
        yield from (node + 1, node - 1, float(node), float(node) + 0.5, str(node))
        if node in (0, 1):
            yield bool(node)  # equal to the number


def is_honest(path, node, value):
    """Whether a site may send this value instead of the node: other numbers of the same form."""
    if isinstance(value, torch.Tensor) and isinstance(node, torch.Tensor):
        real = path[-1] == "loss" and value.dtype in REAL
        return value.shape == node.shape and (real or value.dtype == node.dtype)
    if path[-2:-1] == ("num_seen",) and type(value) is int:
        return abs(value - node) <= 1
    return type(value) is type(node) and not isinstance(value, torch.Tensor) and value == node


def malformed(answer):
    """(path, value) of each change that makes an answer one that no honest site sends; the value
    ``without`` removes the node.
    """
    for path, node in nodes({"uploads": answer["uploads"]}):
        if not path:
            continue
        for value in other_nodes(node):
            if not is_honest(path, node, value):
                yield path, value
        yield path, without


def changed(answer, change):
    path, value = change
    return without(answer, path) if value is without else replaced(answer, path, value)


@pytest.fixture(scope="module")
def heard_before():
    """What ``heard`` has returned, by its words."""
    return {}


@pytest.fixture
def heard(federated, monkeypatch, heard_before):
    """``heard(*words)``: a site's answer in the last round of a run, and what it was asked."""

    def run(*words):
        if words in heard_before:
            return heard_before[words]
        found = []

        def noting(contents, asked):
            found.append(({"uploads": deepcopy(contents)}, asked))
            return checked_uploads(contents, asked)

        monkeypatch.setattr(answers, "checked_uploads", noting)
        federated(*words, "rounds=2", folder="honest")
        monkeypatch.setattr(answers, "checked_uploads", checked_uploads)
        heard_before[words] = found[-1]
        return found[-1]

    return run


def accepted(answer, asked):
    """Reads an answer as the server does. Returns its uploads, or None if it was refused."""
    failures = {"b": "did not answer"}
    uploads = None
    with counted_against("b", failures):
        content = Answer("b", 0, pack(answer)).content(asked.limits)
        uploads = checked_uploads(content["uploads"], asked)
    assert (uploads is None) == ("b" in failures)
    return uploads


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_malformed_upload_is_refused_in_bounded_memory(heard, algorithm):
    answer, asked = heard(f"algorithm={algorithm}", *ALL)
    assert accepted(answer, asked)
    largest = asked.limits.header + asked.limits.tensors
    every = list(malformed(answer))
    assert len(every) > 200
    changes = random.Random(algorithm).sample(every, 60)
    tracemalloc.start()
    for change in changes:
        tracemalloc.reset_peak()
        assert accepted(changed(answer, change), asked) is None, change
        assert tracemalloc.get_traced_memory()[1] < 10 * largest
    tracemalloc.stop()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_with_malformed_uploads_is_one_without_the_site(
    federated, simulated, monkeypatch, caplog, heard, algorithm
):
    words = (f"algorithm={algorithm}", *ALL)
    rounds = 8
    answer, _ = heard(*words)
    # the index of another round may be the right one here
    every = [change for change in malformed(answer) if "round_index" not in change[0]]
    changes = random.Random(f"run of {algorithm}").sample(every, rounds)
    garbled = [lambda sent, change=change: changed(sent, change) for change in changes]
    lost = dict.fromkeys(range(rounds), CLIENTS_OF_B)
    words = (*words, f"rounds={rounds}", "eval_every=20")
    survivors(federated, simulated, monkeypatch, lost, *words, garbled=garbled_by(garbled))
    assert caplog.text.count(": b failed: ") == rounds


def with_numbers(field, number):
    """Fills the floats of a field of each upload with this number."""

    def filled(node):
        if isinstance(node, dict):
            return {key: filled(value) for key, value in node.items()}
        if isinstance(node, list):
            return [filled(value) for value in node]
        if isinstance(node, torch.Tensor) and node.is_floating_point():
            return torch.full_like(node, number)
        return node

    def change(answer):
        uploads = [upload | {field: filled(upload[field])} for upload in answer["uploads"]]
        return answer | {"uploads": uploads}

    return change


def without_count(answer):
    """A site that says that none of its clients sent finite numbers."""
    none = torch.tensor([False])
    return answer | {"uploads": [upload | {"finite": none} for upload in answer["uploads"]]}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_clients_with_numbers_that_are_not_finite_are_left_out(
    federated, simulated, monkeypatch, algorithm
):
    field = "levels" if algorithm == "fedpaq" else "delta"
    numbers = [float("nan"), float("inf")]
    garbled = [with_numbers(field, number) for number in numbers] + [without_count]
    lost = dict.fromkeys(range(3), CLIENTS_OF_B)
    words = (f"algorithm={algorithm}", *ALL, "rounds=3")
    survivors(federated, simulated, monkeypatch, lost, *words, garbled=garbled_by(garbled))


NUMBERS = (float("nan"), -float("inf"), 3e38, -1.0)
MEASURES = "metrics=[drift,clients,updates,gc_share,personal]"


@pytest.mark.parametrize("algorithm", ["fedavg", "fedpaq", "ssf", "fedgc"])
def test_no_number_of_a_site_ends_a_run(federated, algorithm):
    fields = ("delta", "extra", "levels", "loss", "notes")
    garbled = [with_numbers(field, number) for field in fields for number in NUMBERS]
    every = [f"metrics.{name}.every=1" for name in ("clients", "personal", "gc_share")]
    words = (f"algorithm={algorithm}", *ALL, f"rounds={len(garbled)}", "eval_every=50", MEASURES)
    own = ("data.client_test=0.3", "federation.least=1")
    result, _ = federated(*words, *every, *own, garbled=garbled_by(garbled))
    assert len(read_rows(result.folder / "metrics.csv")) == len(garbled)
    assert final_weights(result).isfinite().all()


def lines_of(run):
    with (run.folder / "updates.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_site_measures_only_its_own_clients(federated):
    """What it sends in the rows of other sites' clients does not count."""
    lies = garbled_by([with_numbers("notes", 7.0)])
    words = ("algorithm=fedavg", *ALL, "rounds=1", "metrics=updates")
    honest, _ = federated(*words, folder="honest")
    result, _ = federated(*words, garbled=lies)
    for own, other in zip(lines_of(honest), lines_of(result), strict=True):
        if int(own["client"]) in CLIENTS_OF_B:
            assert other["norm"] == "7"
        else:
            assert own == other


def test_the_share_of_projected_layers_is_a_share(federated):
    """FedGC counts them from what clients send."""
    lie = {"fedgc": {"projected": torch.tensor([2**62, -(2**62)])}}
    change = lambda answer: answer | {"uploads": [u | {"notes": lie} for u in answer["uploads"]]}  # noqa: E731
    result, _ = federated("algorithm=fedgc", *ALL, "rounds=1", garbled=garbled_by([change]))
    assert 0 <= result.metrics["fedgc/cgc_layers"] <= 2
