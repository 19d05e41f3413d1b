"""The runs that the golden tables in ``golden/`` are of."""

import math

from run_folders import curve, write_run


def regression(level, rounds, every):
    """A run of the matrix regression: no accuracies, a relative error that falls to ``level``."""
    rows = [{k: v for k, v in row.items() if not k.startswith("test/")} for row in curve(0.5, rounds)]
    for row in rows[every - 1 :: every]:
        row["test/relative_error"] = level + math.exp(-10 * row["round"] / rounds)
        row["test/loss"] = row["test/relative_error"] ** 2
    return rows


def sample(root):
    """Repetitions, two federations and more, a λ sweep, all endings.

    The choices of config files stand as in the papers' cells, so that they are composed once.
    """

    def add(name, overrides, rows, **config):
        write_run(root / name, rows, overrides, **config)

    cnn = "experiment=cifar10_cnn_gcfed partition.alpha=0.05 algorithm"
    for seed in (1, 2, 3):
        add(f"t5_fedavg_s{seed}", f"{cnn}=fedavg gc=none", curve(0.53 + 0.02 * seed, 800, seed), seed=seed)
        add(f"t5_gcfed_s{seed}", f"{cnn}=fedavg gc=gcfed", curve(0.66 + 0.01 * seed, 800, seed), seed=seed)
    for seed in (1, 2):
        rows = curve(0.55 - 0.015 * seed, 800, seed)
        add(f"t5_fedprox_s{seed}", f"{cnn}=fedprox gc=none", rows, seed=seed)
    scaffold = f"{cnn}=scaffold gc=none"
    rows = [row | {"test/acc": 0.1, "test/loss": math.nan} if row["round"] > 60 else row for row in curve(0.4, 800)]
    add("t5_scaffold_s1", scaffold, rows)
    add("t5_scaffold_s2", scaffold, curve(0.4, 100), seed=2, failure="ValueError: no memory\nTraceback")
    add("t5_scaffold_s3", scaffold, curve(0.4, 50), seed=3, ended=False)
    add("t5_global_s1", f"{cnn}=fedavg gc=global rounds=20", curve(0.3, 20))

    for gc, level, seed in (("none", 0.45, 4), ("gcfed", 0.64, 5)):
        name = "fedavg" if gc == "none" else gc
        add(f"t2_{name}_s1", f"{cnn}=fedavg gc={gc} participation.num_clients=200", curve(level, 800, seed))

    acg = "experiment=cifar10_resnet18_fedacg participation.per_round=2"
    add("acg_fedavg_s1", f"{acg} algorithm=fedavg", curve(0.7, 1000))
    add("acg_fedacg_s1", f"{acg} algorithm=fedacg", curve(0.85, 1000))

    ssf = "experiment=matrix_regression_ssf heterogeneity=low"
    for name, algorithm, level in (("fedavg", "fedavg", 0.009), ("scaffold", "scaffold", 0.0071),
                                   ("ssf", "ssf methods.ssf.ratio=0.2", 0.0076)):  # fmt: skip
        add(f"ssf_{name}_s1", f"algorithm={algorithm} {ssf}", regression(level, 400, 20))

    digits = "data=digits model=mlp model.hidden=[64,64] rounds=30 metrics=drift"
    drift = {"drift/client_norm": 0.8, "drift/update_norm": 0.3}
    for seed in (1, 2):
        for lam in (0.0, 0.5, 1.0):
            rows = curve(0.8 + 0.1 * lam - 0.01 * seed, 30, seed, **drift)
            add(f"digits_lam{lam}_s{seed}", f"{digits} gc.lam={lam}", rows, seed=seed)
        add(f"digits_fedavg_s{seed}", f"{digits} gc=none", curve(0.75, 30, seed, **drift), seed=seed)
    add("digits2_fedavg_s1", f"{digits} partition.alpha=1 gc=none", curve(0.85, 30, 3, every=5))
    add("digits2_gcfed_s1", f"{digits} partition.alpha=1", curve(0.93, 30, 6, every=5))
    return root
