"""Matrix regression with a known optimum: the benchmark of SSF (arXiv 2604.25467, Section 5.1)."""

import numpy as np

from gcfed.data.base import FederatedDataset, Split
from gcfed.utils.checked import Count, Weight, Whole, checked
from gcfed.utils.rng import generator


@checked
def matrix_regression(
    *, num_clients: Count = 20, features: Count = 100, outputs: Count = 10, samples: Count = 200,
    test_samples: Count = 50, shift: Weight = 2.0, noise: Weight = 0.1, ridge: Weight = 0.1, seed: Whole = 0,
) -> FederatedDataset:  # fmt: skip
    """Clients that see one linear map through features around means of their own.

    Client k draws x = m_k + N(0, I) with m_k = ν N(0, I), and y = xW + σ N(0, I) with a W ~ N(0, 1) that all share.
    With equally many samples each, the mean of the clients' objectives ``1/(2n) ‖X_k W − Y_k‖² + μ/2 ‖W‖²``, equations
    130 and 131, is least at ``W* = (mean X_kᵀX_k / n + μI)⁻¹ mean X_kᵀY_k / n``. Transposed, as torch has it, that is
    ``optimum["fc.weight"]``.

    ``shift`` is ν, ``noise`` σ, and ``ridge`` μ, which clients minimise as their ``client.optimizer.weight_decay``;
    samples are those of each client, and client k is group k.
    """
    rng = generator(seed, "matrix_regression")
    weight = rng.standard_normal((features, outputs))
    means = shift * rng.standard_normal((num_clients, 1, features))

    def split(n: int) -> Split:
        x = (means + rng.standard_normal((num_clients, n, features))).reshape(-1, features)
        y = x @ weight + noise * rng.standard_normal((len(x), outputs))
        return Split(x.astype(np.float32), y.astype(np.float32), np.repeat(np.arange(num_clients), n))

    train, test = split(samples), split(test_samples)
    x, y = train.x.astype(np.float64), train.y.astype(np.float64)  # as the clients have them
    best = np.linalg.solve(x.T @ x / len(x) + ridge * np.eye(features), x.T @ y / len(x))
    return FederatedDataset("matrix_regression", outputs, train, test, optimum={"fc.weight": best.T})
