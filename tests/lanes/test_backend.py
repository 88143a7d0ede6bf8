"""How many clients a CPU runs as one program: many of a small model, one of a large one."""

import pytest
import torch
from torch import nn

from fedala.lanes import backend
from fedala.lanes.task import Task
from fedala.models import cnn, fasttext, mlp


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.inner(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.LSTM(4, width, batch_first=True)
        self.fc = nn.Linear(width, 3)

    def forward(self, x):
        return self.fc(self.inner(x)[0][:, -1])


class NoisyEvaluation(nn.Linear):
    def forward(self, x):
        return super().forward(x if self.training else x + 0.1 * torch.randn_like(x))


def make_task(model, x, **options):
    return Task(model, x, torch.arange(len(x)) % 3, [range(len(x))], **options)


def choose(model, x):
    task = make_task(model, x)
    return task.backend.choose_lanes(task)


def test_clients_of_small_models_run_together():
    texts = torch.ones(8, 6, dtype=torch.int64)
    for model, x in (
        (mlp(4, 3), torch.randn(8, 4)),
        (nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3)), torch.randn(8, 4)),
        (fasttext(50, 3), texts),
    ):
        assert choose(model, x) > 500


def test_a_model_with_much_arithmetic_runs_alone():
    images = torch.randn(8, 1, 28, 28)
    assert choose(cnn(), images) == 1
    assert choose(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), images) > 1


def test_lanes_are_as_many_as_are_worth_a_thread(monkeypatch):
    x = torch.randn(8, 4)
    operations = 2 * 5 * 4 * 3  # of a batch of five
    for share, lanes in ((10.5, 10), (4, 4), (3.9, 1), (0.5, 1)):
        monkeypatch.setattr(backend, "THREAD_OPERATIONS", share * operations)
        task = make_task(nn.Linear(4, 3), x, batch_size=5)
        assert task.count_batch_operations() == operations
        assert task.backend.choose_lanes(task) == lanes


def test_fused_recurrence_counts():
    """Torch's LSTM is a single operation on some CPUs, which its counter does not know."""
    task = make_task(Recurrent(5), torch.randn(8, 7, 4), batch_size=2)
    gates = 2 * 2 * 7 * (4 + 5) * 4 * 5
    assert task.count_batch_operations() == gates + 2 * 2 * 5 * 3
    assert choose(Recurrent(5), torch.randn(8, 7, 4)) > 1
    assert choose(Recurrent(200), torch.randn(8, 50, 4)) == 1


def test_a_compiled_model_is_counted_without_a_warning(recwarn):
    model = torch.compile(nn.Linear(4, 3), backend="eager")
    task = make_task(model, torch.randn(8, 4), batch_size=5)
    assert task.count_batch_operations() == 2 * 5 * 4 * 3
    assert not recwarn.list


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Dropout(0.5), nn.Linear(5, 3)),
        nn.Sequential(nn.Flatten(), NoisyEvaluation(12, 3)),
        Attention(),  # torch has no rule for lanes of it
    ],
    ids=["dropout", "noise in evaluation", "attention"],
)
def test_a_model_that_gains_nothing_from_lanes_runs_alone(model):
    assert choose(model, torch.randn(8, 3, 4)) == 1


def test_a_model_that_fails_on_a_trial_runs_alone():
    assert choose(nn.Linear(5, 3), torch.randn(8, 4)) == 1


def test_the_stack_of_all_lanes_stays_small(monkeypatch):
    parameters, batch = 4 * 3 + 3, 10 * 4
    lane = 4 * (parameters + backend.ACTIVATIONS * batch)
    for lanes in (1, 7):
        monkeypatch.setattr(backend, "LARGEST_STACK", lanes * lane)
        assert choose(nn.Linear(4, 3), torch.randn(8, 4)) == lanes
    monkeypatch.setattr(backend, "LARGEST_STACK", 1)
    assert choose(nn.Linear(4, 3), torch.randn(8, 4)) == 1
