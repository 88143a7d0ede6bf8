"""Distances between models, and lanes whose numbers are finite."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedala.lanes.trees import are_finite, squared_distances


def test_distances_are_those_of_all_parameters_of_every_pair():
    generator = torch.Generator().manual_seed(0)

    def models(count):
        shapes = {"large": (count, 100, 130), "number": (count,), "vector": (count, 7)}
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    a, b = models(3), models(2)
    expected = [
        [sum((a[name][i] - b[name][j]).double().square().sum() for name in a) for j in range(2)]
        for i in range(3)
    ]
    distances = squared_distances(a, b)
    torch.testing.assert_close(distances, torch.tensor(expected).double(), rtol=1e-5, atol=0)


def test_near_pairs_are_told_apart_in_float32():
    """By a Gram matrix, ‖a‖² + ‖b‖² − 2ab at this size is off by more than the distance itself."""
    base = torch.full((1000,), 10.0)
    models = {"w": torch.stack([base, base + 1e-3, base])}
    distances = squared_distances(models, models)
    assert distances[0, 1].item() == pytest.approx(1e-3, rel=1e-2)
    assert distances[0, 2].item() == 0
    assert torch.equal(distances, distances.T)


class RecordSizes(TorchDispatchMode):
    """Records how many numbers every new tensor has. A view is not one."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.sizes.append(result.numel())
        return result


def test_distances_of_large_models_take_one_number_for_each_pair():
    """A thousand clients have a million pairs, and their models hundreds of blocks."""
    models = {"w": torch.randn(64, 8 * 4096)}
    with RecordSizes() as made:
        squared_distances(models, models)
    assert max(made.sizes) == 64 * 64


@pytest.mark.parametrize("width", [1, 7, 1000])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(bad, place, width):
    largest = torch.finfo(torch.float32).max
    values = [torch.full((3, width, 2), largest), torch.full((3,), -largest)]
    assert are_finite(values).tolist() == [True, True, True]
    values[0][1].view(-1)[place] = bad
    values[1][2] = bad
    assert are_finite(values).tolist() == [True, False, False]


def test_a_tensor_without_numbers_is_finite():
    assert are_finite([torch.empty(3, 0)]).tolist() == [True, True, True]
    values = [torch.empty(3, 0), torch.tensor([0.0, float("nan"), 0.0])]
    assert are_finite(values).tolist() == [True, False, True]
