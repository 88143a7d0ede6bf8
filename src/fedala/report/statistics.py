"""Paired tests, two-sided: Student's t-test and Wilcoxon's signed-rank test.

They are few lines, so that a report does not need SciPy.
"""

import math
from collections.abc import Sequence

import numpy as np

#: Up to so many pairs, the exact distribution of the ranks is counted.
_MOST_EXACT = 50


def paired_t_test(differences: Sequence[float]) -> float:
    """Return how likely differences at least this far from 0 are if their mean is 0.

    At least two differences, normally distributed.
    """
    values = np.asarray(differences, float)
    count, mean = len(values), float(values.mean())
    error = float(values.std(ddof=1)) / math.sqrt(count)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    freedom, t = count - 1, mean / error
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def wilcoxon_test(differences: Sequence[float]) -> float:
    """Return how likely such ranks are if differences are symmetric about 0.

    Differences of 0 do not count. Up to fifty, the distribution is exact, also with ties. Beyond,
    it is the normal approximation with the correction for ties.
    """
    values = np.asarray(differences, float)
    values = values[values != 0]
    if len(values) == 0:
        return 1.0
    ranks, ties = _rank(np.abs(values))
    positive = float(ranks[values > 0].sum())
    smaller = min(positive, float(ranks.sum()) - positive)
    if len(values) <= _MOST_EXACT:
        return _exact_p_value(ranks, smaller)
    count = len(values)
    variance = count * (count + 1) * (2 * count + 1) / 24
    variance -= float((ties**3 - ties).sum()) / 48
    z = (smaller - count * (count + 1) / 4) / math.sqrt(variance)
    return math.erfc(abs(z) / math.sqrt(2))


def _rank(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ranks from 1, equal values sharing their mean rank, and how many share each."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[index], counts


def _exact_p_value(ranks: np.ndarray, smaller: float) -> float:
    """Count the signs of the ranks for which the sum of the positive ones is as small."""
    doubled = np.rint(2 * ranks).astype(int)  # a shared rank may be a half
    ways = np.zeros(doubled.sum() + 1)
    ways[0] = 1
    for rank in doubled:
        ways[rank:] += ways[:-rank].copy()
    share = ways[: round(2 * smaller) + 1].sum() / 2.0 ** len(ranks)
    return min(1.0, float(2 * share))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), by its continued fraction."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # where the fraction of the other side converges faster
        return 1 - _incomplete_beta(b, a, 1 - x)
    scale = a * math.log(x) + b * math.log1p(-x)
    scale += math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    fraction = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(scale) * fraction / a
