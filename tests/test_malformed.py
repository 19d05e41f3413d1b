"""Invalid settings are refused with their keys before training."""

import pytest
from conftest import composer
from omegaconf import OmegaConf, open_dict

from gcfed.assemble import assemble, build_trainer
from gcfed.check import check
from gcfed.utils.resolvers import ROOT

SMALL = ("callbacks.progress=null", "extras.figures=false", "model.hidden=[8]", "trainer.devices=1")


def refusal(cfg):
    """The error of building a run, or None."""
    try:
        check(cfg)
        parts = assemble(cfg)
        build_trainer(cfg, parts, parts.callbacks)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return None


def changed(tmp_path, key, value):
    cfg = composer([*SMALL, "algorithm=fedadam", "gc=gcfed", f"paths.output_dir={tmp_path}"])
    with open_dict(cfg):
        OmegaConf.update(cfg, key, value, merge=False)
    return cfg


def test_a_run_works_without_a_group_or_names_it(tmp_path):
    """This also builds the default option of each group."""
    defaults = [
        entry for entry in OmegaConf.load(ROOT / "configs/train.yaml").defaults if entry != "_self_"
    ]
    for group in (
        g
        for entry in defaults
        for g, option in entry.items()
        if option and g not in ("hydra", "algorithm")
    ):
        said = refusal(changed(tmp_path, group, None))
        assert said is None or group in said, (group, said)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.dataset.data_dir", 3),
        ("server.tau", 1e30),
        ("data.transform.flip", 3),
        ("partition.min_size", 1.5),
        ("gc.boundary", 3),
        ("trainer.accelerator", "mps"),
        ("trainer.precision", "bf16-mixed"),
        ("name", "../../escape"),
        ("participation.faults.dropout", 1),
        ("optimized_metric", 3),
        ("client_store.folder", ""),
        ("participation.num_clients", 0),
        ("callbacks.checkpoint.every", 1.5),
        ("participation.per_round", 2.5),
        ("data.input_shape", [1, 9, 9]),
    ],
)
def test_an_invalid_setting_is_refused_with_its_key(tmp_path, key, value):
    assert key in (refusal(changed(tmp_path, key, value)) or "")
