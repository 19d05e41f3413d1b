"""Names of earlier versions, which files of one's own may still use."""

from pydoc import locate

import numpy as np
import pytest
from conftest import refuses
from harness import (
    make_download,
    make_net,
    make_received,
    make_round,
    make_upload,
    stack_of,
    train_rounds,
)

import gcfed
from gcfed.assemble import check_buildable
from gcfed.federated.network.lent_network import travelling_state
from gcfed.federated.parts import ClientPart, ServerPart
from gcfed.utils.renamed import MODULES, name_today

MODEL = travelling_state(make_net())


@pytest.mark.parametrize(
    ("thing", "earlier", "today"),
    [
        (make_download(MODEL), "model", "Download.broadcast_model"),
        (make_download(MODEL), "round", "Download.round_index"),
        (make_upload({"w": MODEL["0.weight"][None]}, np.ones(1)), "round", "Upload.round_index"),
        (make_round(MODEL), "start", "Round.broadcast_model"),
        (make_round(MODEL), "model", "Round.server_model"),
        (make_received(MODEL), "start", "Round.broadcast_model"),
        (stack_of(make_net()), "start", "ClientStack.broadcast_model"),
    ],
)
def test_an_earlier_name_is_refused_with_the_name_of_today(thing, earlier, today):
    with refuses(rf"\.{earlier} is now {today}\.$"):
        getattr(thing, earlier)


def test_an_assignment_to_an_earlier_name_is_refused():
    """Otherwise a method would replace a model that nobody sends."""
    with refuses(r"^Download\.model is now Download\.broadcast_model\.$"):
        make_download(MODEL).model = {}


class LooksAhead(ServerPart):
    def on_broadcast(self, download, round):
        download.model |= {name: t + 1 for name, t in download.model.items()}


class Compares(ClientPart):
    def on_clients_end(self, stack, download):
        return {"drift": {name: t - stack.start[name] for name, t in stack.full.items()}}


@pytest.mark.parametrize("method", [LooksAhead(), Compares()])
def test_a_run_with_a_method_of_an_earlier_version_is_refused(method):
    with refuses(r"\.broadcast_model\.$"):
        train_rounds(rounds=1, methods=[method])


EARLIER_CLASSES = {
    "gcfed.data.buffered": ("Answer", "BufferedSchedule"),
    "gcfed.data.clock": ("Clock",),
    "gcfed.data.faults": ("Faults",),
    "gcfed.data.sampling": (
        "Buffered",
        "ClientRecord",
        "DynamicPopulation",
        "LossSampler",
        "Oort",
        "PoissonSampler",
        "PowerOfChoice",
        "UniformSampler",
    ),
    "gcfed.data.schedule": ("Schedule", "Turn"),
}


def test_each_class_of_a_renamed_module_has_its_name_of_today():
    assert EARLIER_CLASSES.keys() == MODULES.keys()
    for module, names in EARLIER_CLASSES.items():
        for name in names:
            today = name_today(f"{module}.{name}")
            found = locate(today)
            assert f"{found.__module__}.{found.__name__}" == today


@pytest.mark.parametrize("module", MODULES)
def test_an_import_of_a_renamed_module_is_refused_with_its_name_of_today(
    tmp_path, monkeypatch, module
):
    """A sampler of the user's own imports its base class."""
    name = f"own_{module.rpartition('.')[2]}"
    (tmp_path / f"{name}.py").write_text(f"import {module}\n")
    monkeypatch.syspath_prepend(tmp_path)
    target = f"participation.sampler._target_={name}.Mine"
    today = MODULES[module]
    with refuses(f"^{target}: its module imports {module}, which is now {today}\\.$"):
        check_buildable(gcfed.configure(target))
