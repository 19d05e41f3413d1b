"""Own data: a function that returns arrays. ``groups`` names the natural client of each sample."""

import numpy as np


def load(samples):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, samples)
    hospital = rng.integers(0, 12, samples)
    x = rng.normal(y[:, None] + 0.1 * hospital[:, None], 1.0, (samples, 5))
    return {"x": x, "y": y, "groups": hospital}
