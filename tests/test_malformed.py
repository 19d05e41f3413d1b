"""Settings that make no sense are refused by their keys before anything is trained."""

import pytest
from conftest import composer
from omegaconf import OmegaConf, open_dict

from gcfed.assemble import assemble, build_trainer
from gcfed.check import check
from gcfed.utils.compose import composed
from gcfed.utils.resolvers import ROOT

SMALL = ("callbacks.progress=null", "extras.figures=false", "model.hidden=[8]", "trainer.devices=1")


def refusal(cfg):
    """What a run says against its config; None if it is built."""
    try:
        check(cfg)
        parts = assemble(cfg)
        build_trainer(cfg, parts, parts.callbacks)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return None


def test_a_run_goes_without_any_group_or_names_it(tmp_path):
    """This also builds the default option of each group."""
    defaults = [entry for entry in OmegaConf.load(ROOT / "configs/train.yaml").defaults if entry != "_self_"]
    for group in (g for entry in defaults for g, option in entry.items() if option and g not in ("hydra", "gc")):
        cfg = composed([*(word for word in SMALL if group != word.split(".")[0]), f"~{group}"])
        with open_dict(cfg):
            OmegaConf.update(cfg, "paths.output_dir", str(tmp_path))
        said = refusal(cfg)
        assert said is None or group in said, (group, said)


@pytest.mark.parametrize(
    ("key", "value"),
    [("data.dataset.data_dir", 3), ("server.tau", 1e30), ("data.transform.flip", 3), ("partition.min_size", 1.5),
     ("gc.boundary", 3), ("trainer.accelerator", "mps"), ("precision", "16-mixed"), ("trainer.precision", "bf16-mixed"),
     ("model.hidden", [0]), ("name", "../../escape"), ("participation.faults.dropout", 1), ("targets", [2]),
     ("optimized_metric", 3), ("client_store.folder", ""), ("rounds", 0)],
)  # fmt: skip
def test_a_setting_that_makes_no_sense_is_refused_by_its_key(tmp_path, key, value):
    cfg = composer([*SMALL, "algorithm=fedadam", "gc=gcfed", f"paths.output_dir={tmp_path}"])
    with open_dict(cfg):
        OmegaConf.update(cfg, key, value, merge=False)
    said = refusal(cfg)
    assert said is not None
    assert said.startswith(key)
