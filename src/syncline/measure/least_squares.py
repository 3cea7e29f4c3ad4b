"""Least squares of relative errors in numbers that are not negative; outliers do not decide."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def robust(matrix: Floats, counts: Floats, num_rows: int, rounds: int = 15) -> Floats:
    """Return x >= 0 for which matrix @ x is near 1, in a sum of about |log(matrix @ x)|.

    By repeated least squares, each row weighted so that its squared error is that of the sum. The
    rows after the first `num_rows` keep their weights.
    """
    weights = counts.copy()
    found = np.zeros(matrix.shape[1])
    for _ in range(rounds):
        root = np.sqrt(weights)
        found = non_negative(matrix * root[:, None], root)
        ratios = np.clip(matrix[:num_rows] @ found, 0.01, 100.0)
        logs = np.abs(np.log(ratios))
        slopes = np.where(logs > 1e-6, logs / np.maximum(np.abs(ratios - 1), 1e-6), 1.0)
        weights[:num_rows] = counts[:num_rows] * slopes**2 / np.maximum(logs, 0.05)
    return found


def non_negative(matrix: Floats, targets: Floats) -> Floats:
    """Return x >= 0 with the least |matrix @ x - targets|.

    Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23: unknowns are freed one by
    one, the one that helps most first, and fixed at zero again if they would become negative.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    found, is_free = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(3 * matrix.shape[1]):
        gain = matrix.T @ (targets - matrix @ found)
        gain[is_free] = 0.0
        if gain.max(initial=0.0) <= 1e-9 * max(1.0, float(np.abs(targets).sum())):
            break
        is_free[int(gain.argmax())] = True
        found = _settled(matrix, targets, found, is_free)
    return found / scale


def _settled(
    matrix: Floats, targets: Floats, found: Floats, is_free: npt.NDArray[np.bool_]
) -> Floats:
    """Solve for the free unknowns; fix those again that would be negative."""
    while is_free.any():
        wanted = np.zeros_like(found)
        wanted[is_free] = np.linalg.lstsq(matrix[:, is_free], targets, rcond=None)[0]
        negative = is_free & (wanted <= 0)
        if not negative.any():
            return wanted
        steps = found[negative] / np.maximum(found[negative] - wanted[negative], 1e-300)
        found = found + float(steps.min()) * (wanted - found)
        is_free &= found > 1e-15
        found[~is_free] = 0.0
    return np.zeros_like(found)
