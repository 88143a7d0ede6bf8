"""Learn ALA's weights of a last linear layer in one GPU kernel."""

import torch
from torch import Tensor

from fedala.cuda import has_kernels
from fedala.lanes.weight_learning import (
    WINDOW,
    Curves,
    Problem,
    are_losses_finite,
    learn_in_batches,
)

#: The kernel has a row for each sample of a batch. With more of them, it does not compile.
LARGEST_BATCH = 256


def takes_kernel(problem: Problem) -> bool:
    """Tell whether the kernel can learn W: of a plain head, in batches that fit into registers."""
    task = problem.cohort.task
    if task.device.type != "cuda" or task.dtype != torch.float32:
        return False
    return task.batch_size <= LARGEST_BATCH and problem.is_plain_head and has_kernels(task.device)


def learn_head(problem: Problem) -> Curves:
    """Learn W of a last linear layer: all batches and epochs of all lanes in one kernel.

    The host does not wait for the device. If the kernel cannot take the features or has no room
    for them, learn batch after batch.
    """
    from triton.runtime.errors import OutOfResources

    from fedala.cuda.ala_kernel import Head, learn_weights

    task, settings, samples = problem.cohort.task, problem.settings, problem.samples
    table, positions = problem.cohort.features(problem.cut, problem.start, samples)
    if table is None:  # no lane has a sample
        none = torch.zeros_like(problem.trained, dtype=torch.int64)
        return _make_curves(torch.empty(len(none), 0, device=none.device), none)
    if table.dim() != 2:
        return learn_in_batches(problem)
    most = max(settings.max_epochs, settings.min_epochs)
    least = torch.full_like(samples.counts, settings.min_epochs)
    try:
        losses, epochs = learn_weights(
            table.float(),
            positions,
            task.targets(samples.matrix),
            torch.where(problem.learning, samples.counts, 0),
            least,
            torch.where(problem.trained, least, most),
            *(
                Head(*(params[name] for name in problem.update))
                for params in (problem.local, problem.update, problem.weights)
            ),
            batch_size=task.batch_size,
            eta=settings.eta,
            threshold=settings.threshold,
            most=most,
            window=WINDOW,
        )
    except OutOfResources:  # many classes or large batches on a small GPU
        return learn_in_batches(problem)
    return _make_curves(losses, epochs)


def _make_curves(losses: Tensor, epochs: Tensor) -> Curves:
    return Curves(losses, epochs, are_losses_finite(losses, epochs))
