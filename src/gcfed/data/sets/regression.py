"""Matrix regression with a known optimum: SSF's benchmark (arXiv 2604.25467, Section 5.1)."""

import numpy as np

from gcfed.data.base import FederatedDataset, Split
from gcfed.utils.checked import Count, Weight, Whole, checked
from gcfed.utils.rng import generator


@checked
def matrix_regression(
    *, num_clients: Count = 20, features: Count = 100, outputs: Count = 10, samples: Count = 200,
    test_samples: Count = 50, shift: Weight = 2.0, noise: Weight = 0.1, ridge: Weight = 0.1, seed: Whole = 0,
) -> FederatedDataset:  # fmt: skip
    """Clients share one linear map, and each has features around a mean of its own.

    Client k draws x = m_k + N(0, I) with m_k = ν N(0, I), and y = xW + σ N(0, I); all clients share W ~ N(0, 1). The
    mean of the clients' objectives ``1/(2n) ‖X_k W − Y_k‖² + μ/2 ‖W‖²`` (equations 130 and 131) has its minimum at
    ``W* = (mean X_kᵀX_k / n + μI)⁻¹ mean X_kᵀY_k / n``. ``optimum["fc.weight"]`` is W*, transposed as in torch.

    Args:
        samples, test_samples: of each client. Client k is group k.
        shift: ν.
        noise: σ.
        ridge: μ. Clients minimise it as their ``client.optimizer.weight_decay``.
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
