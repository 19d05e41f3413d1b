"""One rule for the local solver of all algorithms, and its table in docs/methods.md."""

import re

import pytest
from harness import DOCUMENTED
from omegaconf import OmegaConf

from gcfed.assemble import assemble
from gcfed.utils.resolvers import ROOT

FAST = ("data.limit_train=200", "data.limit_test=60", "participation.num_clients=8")
# Keys of a method's own steps, beside the momentum.
OWN_STEPS = {
    "fedgc": {"client.steps"},  # B, the number of mini-batches
    "fedadamw": {"client.optimizer.lr", "client.optimizer.weight_decay"},  # of Adam's steps
}


def flat(node, prefix):
    """Dotted key → value of a nested dict."""
    found = {}
    for key, value in node.items():
        name = f"{prefix}.{key}"
        found |= flat(value, name) if isinstance(value, dict) else {name: value}
    return found


def solver_of(cfg):
    return flat(OmegaConf.to_container(cfg.client, resolve=True), "client")


@pytest.mark.parametrize("name", DOCUMENTED)
def test_an_algorithm_changes_momentum_and_clipping_only_where_others_are_refused(config, name):
    default = solver_of(config())
    own = solver_of(config(f"algorithm={name}"))
    changed = {key for key in own if own[key] != default[key]} - OWN_STEPS.get(name, set())
    if not changed:
        return
    assert changed == {"client.optimizer.momentum"}
    assert own["client.optimizer.momentum"] == 0
    # The default, and any other.
    for momentum in (default["client.optimizer.momentum"], 0.1):
        cfg = config(f"algorithm={name}", f"client.optimizer.momentum={momentum}", *FAST)
        with pytest.raises(ValueError, match=r"needs client\.optimizer\.momentum=0: "):
            assemble(cfg)


def test_the_table_of_the_page_has_the_momentum_of_every_algorithm(config):
    text = (ROOT / "docs/methods.md").read_text()
    section = text.partition("## The local solver\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*`) \| (.+) \| ([\d.]+) \|$", section, re.MULTILINE)
    printed = {
        name: float(here) for names, _, here in rows for name in names.strip("`").split("`, `")
    }
    assert sum(len(names.split(", ")) for names, _, _ in rows) == len(printed)  # each stands once
    found = {name: config(f"algorithm={name}").client.optimizer.momentum for name in DOCUMENTED}
    assert printed == found
