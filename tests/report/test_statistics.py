"""The paired tests against SciPy's, and against counting every case."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from fedala.report.statistics import paired_t_test, wilcoxon_test


@pytest.mark.parametrize("count", [2, 3, 5, 10, 200])
@pytest.mark.parametrize("shift", [0.0, 0.3, 3.0, 30.0])
def test_t_test(count, shift):
    differences = np.random.default_rng(count).normal(shift, 1, count)
    expected = stats.ttest_1samp(differences, 0).pvalue
    assert paired_t_test(differences) == pytest.approx(expected, rel=1e-10)


def test_t_test_of_equal_differences():
    assert paired_t_test([0.0, 0.0, 0.0]) == 1
    assert paired_t_test([0.5, 0.5]) == 0


@pytest.mark.parametrize("count", [2, 6, 20, 50])
@pytest.mark.parametrize("shift", [0.0, 0.5, 5.0])
def test_exact_wilcoxon_test(count, shift):
    differences = np.random.default_rng(count).normal(shift, 1, count)
    expected = stats.wilcoxon(differences, method="exact").pvalue
    assert wilcoxon_test(differences) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("differences", [[1, 1, -2, 3, 3, 3, 0], [-1, -1, -1], [2, -2], [5, 0, 0]])
def test_exact_wilcoxon_test_with_ties_counts_every_choice_of_signs(differences):
    present = [d for d in differences if d]
    ranks = stats.rankdata(np.abs(present))
    observed = abs(np.sign(present) @ ranks)
    sums = [abs(np.array(signs) @ ranks) for signs in product((-1, 1), repeat=len(present))]
    assert wilcoxon_test(differences) == pytest.approx(np.mean(np.array(sums) >= observed))


@pytest.mark.parametrize("shift", [0.0, 0.2, 1.0])
def test_wilcoxon_test_of_many_pairs_with_ties_and_zeros(shift):
    differences = np.random.default_rng(0).normal(shift, 1, 120).round(1)
    expected = stats.wilcoxon(
        differences, zero_method="wilcox", correction=False, method="asymptotic"
    ).pvalue
    assert 0 in differences
    assert wilcoxon_test(differences) == pytest.approx(expected, rel=1e-10)


def test_wilcoxon_test_of_equal_pairs():
    assert wilcoxon_test([0.0, 0.0]) == 1
