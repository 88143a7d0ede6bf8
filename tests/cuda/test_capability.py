"""The kernels are offered only to GPUs that can run them. The GPUs here are made up."""

import importlib.util

import pytest
import torch
from torch import nn

from fedala import cuda
from fedala.cuda.ala_learner import takes_kernel
from fedala.lanes.layers import Cut
from fedala.lanes.losses import CrossEntropy, OwnLoss
from fedala.lanes.weight_learning import Problem, Settings


@pytest.fixture
def gpus(monkeypatch):
    """Pretend to have an Ampere, a Turing and a Hopper GPU, and record who is asked."""
    capabilities, asked = [(8, 0), (7, 5), (9, 0)], []

    def get_capability(index):
        asked.append(index)
        return capabilities[index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", get_capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "_has_triton", lambda: True)
    cuda._has_kernels.cache_clear()
    yield asked
    cuda._has_kernels.cache_clear()


def test_an_old_gpu_has_no_kernels_and_each_gpu_is_asked_once(gpus):
    for _ in range(3):
        found = [cuda.has_kernels(torch.device("cuda", index)) for index in range(3)]
        assert found == [True, False, True]
    assert gpus == [0, 1, 2]


def test_a_device_without_an_index_is_the_current_one(gpus, monkeypatch):
    assert cuda.has_kernels()
    assert cuda.has_kernels(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert not cuda.has_kernels()
    assert not cuda.has_kernels(torch.device("cuda"))


def test_without_triton_no_gpu_has_kernels(gpus, monkeypatch):
    monkeypatch.setattr(cuda, "_has_triton", lambda: False)
    assert not cuda.has_kernels()
    assert gpus == []


def test_triton_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not cuda._has_triton()


def test_a_triton_without_tuples_cannot_compile_the_kernels(monkeypatch):
    """So it is in Triton 3.2, which comes with torch 2.6."""
    language = pytest.importorskip("triton.language", reason="needs triton")
    assert cuda._has_triton()
    monkeypatch.delattr(language, "tuple")
    assert not cuda._has_triton()


class TaskOnGpu:
    """The part of a task that decides between the learners."""

    dtype, loss, batch_size = torch.float32, CrossEntropy(), 10
    y = torch.zeros(4, dtype=torch.int64)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    layers = (("1.weight", "1.bias"), ("0.weight", "0.bias"))

    def __init__(self, device):
        self.device = torch.device(device)


class CohortOnGpu:
    def __init__(self, device):
        self.task = TaskOnGpu(device)


def problem_on(device):
    cut = Cut(TaskOnGpu.model, 2)
    cut.p = 1
    update = {"1.weight": torch.ones(1, 2, 3), "1.bias": torch.ones(1, 2)}
    start = dict(update)
    return Problem(CohortOnGpu(device), Settings(), None, None, {}, {}, update, start, None, cut)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:0", True),
        ("cuda:1", False),
        ("cuda:2", True),
        ("cpu", False),
    ],
)
def test_weight_learning_takes_the_kernel_only_on_a_gpu_that_has_it(gpus, device, expected):
    assert takes_kernel(problem_on(device)) is expected


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (CrossEntropy(), True),
        (CrossEntropy(smoothing=0.1), False),
        (CrossEntropy(weights=(1.0, 2.0)), False),
        (OwnLoss(nn.functional.cross_entropy), False),
    ],
)
def test_weight_learning_takes_the_kernel_only_for_plain_cross_entropy(gpus, loss, expected):
    problem = problem_on("cuda:0")
    problem.cohort.task.loss = loss
    assert takes_kernel(problem) is expected


def test_weight_learning_does_not_take_the_kernel_for_batches_that_do_not_fit(gpus):
    problem = problem_on("cuda:0")
    problem.cohort.task.batch_size = 5000  # as `batch_size = full` makes it
    assert not takes_kernel(problem)
