"""Of each setting: what its group of settings says is what its class does by default, and where its range ends."""

import inspect
import re
from functools import partial
from math import nextafter

import pytest
import torch
from hydra.utils import get_object
from omegaconf import OmegaConf

from gcfed.utils.resolvers import CONFIGS

GROUPS = ("aggregator", "algorithm", "attack", "client", "gc", "metrics", "partition", "quantization")
# A class with two groups has the defaults of the other one.
OTHERS = {
    "aggregator/bulyan: hostile", "aggregator/weighted_mean: weighting", "algorithm/fedacg: mu",
    "attack/sign_flip: factor",
}  # fmt: skip


def settings(node):
    """(key, value, default) of every plain setting of a class of ours."""
    for value in node.values():
        if isinstance(value, dict):
            yield from settings(value)
    if str(node.get("_target_")).startswith("gcfed."):
        parameters = inspect.signature(get_object(node["_target_"])).parameters
        for key in node.keys() & parameters.keys():
            if "$" not in str(node[key]) and parameters[key].default is not inspect.Parameter.empty:
                yield key, node[key], parameters[key].default


@pytest.mark.parametrize("group", GROUPS)
def test_a_class_and_its_group_agree(group):
    found = 0
    for path in sorted((CONFIGS / group).glob("*.yaml")):
        for key, value, default in settings(OmegaConf.to_container(OmegaConf.load(path))):
            found += 1
            if f"{group}/{path.stem}: {key}" not in OTHERS:
                assert value == (list(default) if isinstance(default, tuple) else default), f"{path}: {key}"
    assert found


# The class, its settings' prefix, and of each setting: its range ("(" and ")": without the end), "whole", "null"
# ("sometimes": beside some others), "auto"; "flag"; or its choices.
RANGES = """
federated.faults.Faults participation.faults: stragglers [0 1] null, deadline [1 inf] whole null
federated.faults.Faults participation.faults: extra [0 inf] whole null
federated.solver.LocalSolver client: epochs [1 inf] whole, steps [1 inf] whole null, batch_size [1 inf] whole
federated.solver.LocalSolver client: last_batch keep|drop|wrap, lr_decay (0 1], clip_norm (0 inf] null, graphs flag
federated.solver.LocalSolver client: stack [1 inf] whole auto
federated.aggregate.MeanAggregator aggregator: weighting uniform|samples
methods.centralization.GradientCentralization gc: local flag, server flag, local_rounds [1 inf] whole null
methods.centralization.GradientCentralization gc: lam [0 1] sometimes, tensors weights|all
methods.centralization.GradientCentralization gc: mean out|out_in|out_kernel|out_in_height|in_kernel
methods.fedsol.FedSol methods.fedsol: rho [0 inf], temperature (0 inf], adaptive flag
methods.sam.Sam methods.sam: rho [0 inf]
methods.clip_update.ClipUpdate methods.clip_update: max_norm (0 inf], quantile [0 1] null, lr (0 inf]
methods.fedlc.FedLC methods.fedlc: tau [0 inf], exponent (0 inf]
methods.fedgc.FedGC methods.fedgc: margin [0 inf], ridge [0 inf], layerwise tensor|layer|model, cgc flag, sgc flag
methods.feddc.FedDC methods.feddc: alpha [0 inf], correction update|control
methods.ssf.SSF methods.ssf: ratio (0 1], refresh [1 inf] whole
methods.fedsub.FedSub methods.fedsub: ratio (0 1], refresh [1 inf] whole, update_absent flag
methods.fedcm.FedCM methods.fedcm: alpha (0 1]
methods.fedmlb.FedMLB methods.fedmlb: ce [0 inf], kl [0 inf], tau (0 inf]
methods.lookahead.LookAhead methods.lookahead: momentum [0 1), update momentum|delta
methods.feddyn.FedDyn methods.feddyn: alpha (0 inf], divide_by clients|authors
methods.moon.Moon methods.moon: mu [0 inf], temperature (0 inf]
methods.fedreg.FedReg methods.fedreg: gamma [0 1], beta (0 1], eta_s (0 inf], eta_p (0 inf], iterations [1 inf] whole
methods.fedreg.FedReg methods.fedreg: pseudo flag, perturbed flag
methods.fedcurv.FedCurv methods.fedcurv: lam [0 inf], chunk [1 inf] whole
methods.quantization.Quantization quantization: bits [2 22] whole
methods.proximal.Proximal methods.proximal: mu [0 inf]
methods.fedntd.FedNTD methods.fedntd: beta [0 inf], tau (0 inf], ce_weight [0 inf]
methods.scaffold.Scaffold methods.scaffold: momentum_correction flag
methods.feddecorr.FedDecorr methods.feddecorr: beta [0 inf], scale paper|authors
aggregators.geometric_median.GeometricMedian aggregator: iterations [1 inf] whole, nu (0 inf]
aggregators.norm_clip.NormClip aggregator: max_norm (0 inf]
aggregators.norm_clip.MedianClip aggregator: factor (0 inf]
aggregators.krum.Krum aggregator: hostile [0 0.5)
attacks.colluding.ALIE attack: clients [0 1], z [0 1e6] null
attacks.colluding.IPM attack: epsilon [0 inf]
attacks.byzantine.Scale attack: factor [-1e30 1e30]
attacks.byzantine.Gaussian attack: factor [0 inf]
metrics.leakage.Leakage metrics.leakage: every [1 inf] whole, images [1 inf] whole, optimizer lbfgs|adam
metrics.leakage.Leakage metrics.leakage: iterations [1 inf] whole, restarts [1 inf] whole
metrics.global_model.Classes metrics.classes: every [1 inf] whole, figures flag
metrics.local_models.Forgetting metrics.forgetting: samples [1 inf] whole null
metrics.local_models.CKA metrics.cka: samples [1 inf] whole
metrics.surface.Surface metrics.surface: grid [2 1000] whole, margin [0 inf], samples [1 inf] whole null, figures flag
metrics.surface.Surface metrics.surface: split test|train
optim.fedopt.FedAdam server: lr [0 inf], tau [1e-12 inf]
checkpoints.writing.RoundCheckpoint callbacks.checkpoint: every [1 inf] whole
data.partition.Dirichlet partition: alpha [1e-100 1e100], min_size [1 inf] whole, max_tries [1 inf] whole
data.partition.DirichletBalanced partition: alpha [1e-100 1e100]
data.partition.ClassesPerClient partition: classes [1 inf] whole
data.skews.Shards partition: shards [1 inf] whole
data.skews.DirichletSizes partition: alpha [1e-100 1e100], min_size [1 inf] whole
data.augment.ImageTransform data.transform: crop_padding [0 1000] whole, flip flag, rotation [0 180] whole
"""
REQUIRED = {
    "optimizer": partial(torch.optim.SGD, lr=0.1), "alpha": 0.5, "folder": "x", "dirpath": "x", "mean": [0.5],
    "std": [0.5], "params": [torch.zeros(1, requires_grad=True)],
}  # fmt: skip


def edges(kind):
    """What a setting takes, and what it does not."""
    if kind == "flag":
        return [True, False], [1, "x", None]
    if "|" in kind:
        return kind.split("|"), ["x", None]
    interval, *words = re.fullmatch(r"([\[(]\S+ \S+[\])])((?: \w+)*)", kind).groups()
    words = words[0].split()
    low, high = (float(end) for end in interval[1:-1].split())
    whole = "whole" in words
    beyond = (low - 1, high + 1) if whole else (nextafter(low, -1e300), nextafter(high, 1e300))
    taken = [None] * ("null" in words) + ["auto"] * ("auto" in words)
    refused = (
        ["x", True]
        + [None] * (not {"null", "sometimes"} & {*words})
        + ["auto"] * ("auto" not in words)
        + [low + 0.5] * whole
    )
    within = (low + 1, high - 1) if whole else (nextafter(low, 1e300), nextafter(high, -1e300))
    if interval.startswith("(0 "):  # "above 0": what is so small makes nothing of what it scales
        within, refused = (1e-18, within[1]), [*refused, nextafter(1e-18, 0)]
    for end, closed, out, near in zip((low, high), "[]", beyond, within, strict=True):
        if end < 1e300:
            (taken if closed in interval else refused).append(end)
            taken.append(near)
            refused.append(out)
    return tuple(
        [int(v) if whole and isinstance(v, float) and v % 1 == 0 else v for v in v_s] for v_s in (taken, refused)
    )


LINES = RANGES.strip().splitlines()


@pytest.mark.parametrize("line", LINES, ids=[line.split()[0] for line in LINES])
def test_a_setting_is_taken_up_to_the_ends_of_its_range_and_named_beyond(line):
    (target, prefix), kinds = line.split(": ")[0].split(), line.split(": ")[1].split(", ")
    cls = get_object(f"gcfed.{target}")
    needed = {name for name, p in inspect.signature(cls).parameters.items() if p.default is inspect.Parameter.empty}
    for name, kind in (setting.split(" ", 1) for setting in kinds):
        taken, refused = edges(kind)
        others = {key: REQUIRED[key] for key in needed - {name}} | ({"boundary": "fc2"} if prefix == "gc" else {})
        for value in taken:
            cls(**others | {name: value})
        for value in refused:
            with pytest.raises(ValueError, match=rf"^({re.escape(prefix)}\.)?{re.escape(f'{name}={value}')}[: ]"):
                cls(**others | {name: value})
