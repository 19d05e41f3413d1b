"""Only tensors are read from a checkpoint or an exported model.

Nothing in them is composed, called or resolved.
"""

import json
import re

import pytest
import torch
from conftest import type_command
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from gcfed.folders.folder import CHECKPOINT, CONFIG, EXPORT
from gcfed.run import evaluate, train

FAST = (
    "rounds=2",
    "participation.num_clients=5",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=40",
    "algorithm=scaffold",
    "callbacks=best",
    "model.hidden=[8]",
)
CALLED: list[object] = []
TEXT = "${sentinel:}"
NODE = {"_target_": "test_trust.sentinel", "text": TEXT}


def sentinel(*args, **kwargs):
    CALLED.append((args, kwargs))
    return "called"


@pytest.fixture
def finished(config, tmp_path):
    """A finished run's result and folder, with a resolver that must not be called."""
    OmegaConf.register_new_resolver("sentinel", sentinel, replace=True)
    CALLED.clear()
    yield train(config(*FAST, folder=tmp_path / "run")), tmp_path / "run"
    assert not CALLED
    assert OmegaConf.create({"x": TEXT}).x == "called"  # the resolver works
    OmegaConf.clear_resolver("sentinel")


def infected(tree, keep=()):
    """A copy of a tree.

    Each text becomes an interpolation. Each dict and list also gets a node with a ``_target_``.
    """
    if isinstance(tree, dict):
        same = {key: value if key in keep else infected(value, keep) for key, value in tree.items()}
        return same | {"evil": NODE, "_target_": NODE["_target_"], TEXT: TEXT}
    if isinstance(tree, list):
        return [*(infected(value, keep) for value in tree), NODE, TEXT]
    return TEXT if isinstance(tree, str) else tree


LIGHTNINGS = (
    "optimizer_states",
    "lr_schedulers",
    "loops",
    "state_dict",
    "pytorch-lightning_version",
)
CHECKED = ("identity", "checksums", "scaling", "processes", "versions")


@pytest.mark.parametrize(
    ("keep", "goes_on"),
    [(CHECKED, False), ((*CHECKED, *LIGHTNINGS, "callbacks"), True)],
    ids=["all", "our own record"],
)
def test_nothing_in_a_checkpoint_is_called_or_resolved(finished, config, keep, goes_on):
    """A test, a resumed run and a warm start read the checkpoint."""
    result, folder = finished
    path = folder / CHECKPOINT
    torch.save(infected(torch.load(path, weights_only=True), keep), path)
    assert evaluate(config(*FAST, f"ckpt_path={path}"))["test/acc"] == pytest.approx(
        result.metrics["test/acc"]
    )
    train(config(*FAST, "rounds=1", f"model.start={path}", folder=folder.with_name("begun")))
    try:
        assert (
            train(config(*FAST, "rounds=3", "ckpt_path=last", folder=folder)).metrics["round"] == 3
        )
    except Exception:
        assert not goes_on


def test_nothing_in_an_exported_model_is_called_or_resolved(finished, config):
    path = finished[1] / EXPORT
    tensors = load_file(path)
    words = (*FAST, f"ckpt_path={path}")
    save_file(
        tensors, path, metadata={"round": "2", TEXT: TEXT, "config": json.dumps({"model": NODE})}
    )
    assert evaluate(config(*words))["round"] == 2
    for content, metadata in (
        ({**tensors, TEXT: torch.zeros(1)}, None),
        (tensors, {"round": TEXT}),
    ):
        save_file(content, path, metadata=metadata)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            evaluate(config(*words))


@pytest.mark.slow
def test_eval_takes_the_settings_of_the_runs_folder_or_of_the_command_line(finished, tmp_path):
    result, folder = finished
    expected = pytest.approx(
        {"round": 2, **{k: result.metrics[k] for k in ("test/acc", "test/loss")}}
    )

    def figures(*words):
        return json.loads(type_command(tmp_path, "eval.py", *words).splitlines()[-1])

    assert figures(f"ckpt_path={folder / CHECKPOINT}") == expected
    fewer = figures(f"ckpt_path={folder / EXPORT}", "data.limit_test=20")
    assert fewer["test/loss"] != result.metrics["test/loss"]
    alone = (folder / EXPORT).rename(tmp_path / EXPORT)
    said = type_command(tmp_path, "eval.py", f"ckpt_path={alone}", code=1)
    assert f"there is no {tmp_path / CONFIG}. Name the settings of its run: model=… data=…" in said
    settings = (
        "data=digits",
        "model=mlp",
        "model.hidden=[8]",
        "data.limit_train=100",
        "data.limit_test=40",
    )
    assert figures(f"ckpt_path={alone}", *settings) == expected
