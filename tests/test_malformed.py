"""Settings that make no sense are refused by their keys before anything is trained."""

import re

import pytest
import torch
from conftest import composer
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict

from gcfed.assemble import assemble, build_trainer
from gcfed.check import check
from gcfed.utils.compose import check_groups
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


def test_every_group_refuses_an_unknown_option_and_runs_without_or_says_why_not(tmp_path):
    defaults = [entry for entry in OmegaConf.load(ROOT / "configs/train.yaml").defaults if entry != "_self_"]
    chosen = {group: option for entry in defaults for group, option in entry.items() if option and group != "hydra"}
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        for group in chosen:
            with pytest.raises(HydraException, match=rf"Could not find '{group}/nonsense'"):
                compose("train", [*SMALL, f"{group}=nonsense"])
            for option in (
                "null",
                "3",
                "[a,null]",
                "nan",
                "[nan,inf]",
                "-inf",
                "true",
                "{a:1}",
                "[[a]]",
                "a,null",
                "1e3",
            ):
                word = f"{group}={option}"
                with pytest.raises(ValueError, match=rf"^{re.escape(word)} names no option of {group}: choose \w"):
                    check_groups([word])
            check_groups([f"{group}=a", f"{group}=[a,'null']", f"{group}=a,b", f"~{group}", f"+{group}=[]"])
            cfg = compose("train", [f"~{group}"])
            with open_dict(cfg):
                OmegaConf.update(cfg, "paths.output_dir", str(tmp_path))
            said = refusal(cfg)
            assert said is None or group in said, (group, said)


@pytest.mark.parametrize(
    ("key", "value"),
    [("data.dataset.data_dir", 3), ("server.tau", 1e30), ("data.transform.flip", 3), ("partition.min_size", 1.5),
     ("rond", 3), ("gc.boundary", 3), ("trainer.accelerator", "gpu"), ("trainer.limit_val_batches", 0),
     ("model.hidden", [0]), ("name", "../../escape"), ("attack.clients", 0.2), ("quantization.bits", 4),
     ("participation.faults.dropout", 1), ("targets", [2]), ("optimized_metric", 3),
     ("client_store.folder", ""), ("methods.proximal", {"mu": 1}), ("callbacks.checkpoint.dirpath", "")],
)  # fmt: skip
def test_a_setting_that_makes_no_sense_is_refused_by_its_key(tmp_path, monkeypatch, key, value):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = composer([*SMALL, "algorithm=fedadam", f"paths.output_dir={tmp_path}"])
    with open_dict(cfg):
        OmegaConf.update(cfg, key, value, merge=False)
    said = refusal(cfg)
    assert said is not None
    assert said.startswith(key)
