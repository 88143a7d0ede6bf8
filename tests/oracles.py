"""Two oracles of ALA. They share no code with the package's weight learning, nor with each other.

`learn_by_the_paper` is equations 4 and 5 as formulas: W is the variable, and autograd
differentiates the loss of the blend with respect to W itself. It knows tensors only. `PaperALA` is
one client that learns with it, round after round.

`learn_like_the_authors` follows the authors' published code: a temporary model whose parameters are
overwritten after every batch, `loss.backward()` on the whole module, and the chain rule by hand. As
everywhere in this project, and unlike in that code, buffers are the received ones, the model is in
evaluation mode, and an epoch's loss is the mean over its batches.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedala.lanes.randomness import draw

Params = dict[str, Tensor]


# --- the paper's mathematics ----------------------------------------------------------------------


def blend(local: Params, received: Params, weights: Params) -> Params:
    """Equation 4: ŵ = w + (g − w) ⊙ W."""
    return {n: local[n] + (received[n] - local[n]) * weights[n] for n in weights}


def learn_by_the_paper(
    loss: Callable[[Params, Any], Tensor],
    local: Params,
    received: Params,
    weights: Params,
    batches: Sequence[Any],
    *,
    eta: float,
    is_enough: Callable[[list[float]], bool],
) -> tuple[Params, list[float]]:
    """Repeat equation 5, W ← clip₀₁(W − η·∂L/∂W), until the epoch losses are enough."""
    losses: list[float] = []
    while not is_enough(losses):
        each = []
        for batch in batches:
            variables = {n: w.detach().clone().requires_grad_() for n, w in weights.items()}
            value = loss(blend(local, received, variables), batch)
            slopes = torch.autograd.grad(value, list(variables.values()))
            weights = {
                n: torch.clip(w.detach() - eta * slope, 0, 1)
                for (n, w), slope in zip(variables.items(), slopes, strict=True)
            }
            each.append(value.item())
        losses.append(sum(each) / len(each))
    return weights, losses


def has_settled(losses: list[float], threshold: float) -> bool:
    """The paper's criterion: the standard deviation of the last ten of at least eleven losses."""
    last = np.array(losses[-10:])
    return len(losses) > 10 and np.sqrt(np.mean((last - last.mean()) ** 2)) < threshold


class PaperALA:
    """One client's ALA on the named parameters: a sample each round, W from round to round."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        rows: np.ndarray,
        names: Sequence[str],
        *,
        client: int,
        seed: int = 0,
        batch_size: int,
        eta: float,
        share: float = 0.8,
        max_epochs: int,
        threshold: float = 0.01,
    ) -> None:
        self.x, self.y, self.rows, self.names = x, y, rows, names
        self.client, self.seed, self.batch_size = client, seed, batch_size
        self.eta, self.share = eta, share
        self.max_epochs, self.threshold = max_epochs, threshold
        self.weights: Params = {}
        self.epochs = 0
        """How many epochs the last round took."""

    def __call__(
        self, start: nn.Module, local: nn.Module, received: nn.Module, *, round: int
    ) -> nn.Module:
        """Return `start` with the blend of `local` and `received` on the named parameters."""
        result = copy.deepcopy(start)
        old, new = (
            {name: model.get_parameter(name).detach() for name in self.names}
            for model in (local, received)
        )
        self.epochs = 0
        if len(self.rows) == 0 or all(torch.equal(old[name], new[name]) for name in self.names):
            result.load_state_dict(new, strict=False)
            return result
        is_initial = not self.weights
        hat = copy.deepcopy(start).eval()

        def loss(parameters: Params, rows: np.ndarray) -> Tensor:
            return F.cross_entropy(functional_call(hat, parameters, (self.x[rows],)), self.y[rows])

        def is_enough(losses: list[float]) -> bool:
            if is_initial and len(losses) < self.max_epochs:
                return has_settled(losses, self.threshold)
            return len(losses) > 0

        self.weights, losses = learn_by_the_paper(
            loss,
            old,
            new,
            self.weights or {name: torch.ones_like(old[name]) for name in self.names},
            self._draw_batches(round),
            eta=self.eta,
            is_enough=is_enough,
        )
        self.epochs = len(losses)
        result.load_state_dict(blend(old, new, self.weights), strict=False)
        return result

    def _draw_batches(self, round: int) -> list[np.ndarray]:
        """A share of the samples in their own order, cut into batches."""
        size = max(1, int(self.share * len(self.rows) + 1e-9))
        order = draw(self.seed, "ala sample", client=self.client, round=round)
        rows = self.rows[np.sort(order.permutation(len(self.rows))[:size])]
        return np.split(rows, range(self.batch_size, len(rows), self.batch_size))


# --- the authors' way -----------------------------------------------------------------------------


def run_model(model: nn.Module, x: Any) -> Any:
    return model(*x) if isinstance(x, tuple) else model(**x) if isinstance(x, dict) else model(x)


def take_rows(x: Any, rows: slice) -> Any:
    if isinstance(x, tuple):
        return tuple(value[rows] for value in x)
    return {key: value[rows] for key, value in x.items()} if isinstance(x, dict) else x[rows]


def learn_like_the_authors(
    local: nn.Module,
    received: nn.Module,
    x: Any,
    y: Tensor,
    governed: Sequence[str],
    *,
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    epochs: int = 3,
    eta: float = 1.0,
    batch_size: int = 4,
    weights: Params | None = None,
) -> tuple[nn.Module, Params, list[float]]:
    """Return the initialised model, W, and each epoch's loss. Samples keep their order."""
    temporary = copy.deepcopy(received).eval()
    for name, parameter in temporary.named_parameters():
        parameter.requires_grad_(name in governed)
    upper = [
        [model.get_parameter(name) for name in governed] for model in (temporary, local, received)
    ]
    ones = {n: torch.ones_like(p.data) for n, p in zip(governed, upper[1], strict=True)}
    learned = [value.clone() for value in (ones if weights is None else weights).values()]
    optimizer = torch.optim.SGD(upper[0], lr=0)  # it clears gradients, and never steps
    losses = []

    def overwrite() -> None:
        for param_t, param, param_g, weight in zip(*upper, learned, strict=True):
            param_t.data = param.data + (param_g.data - param.data) * weight

    overwrite()
    for _ in range(epochs):
        each = []
        for first in range(0, len(y), batch_size):
            rows = slice(first, first + batch_size)
            optimizer.zero_grad()
            value = loss(run_model(temporary, take_rows(x, rows)), y[rows])
            value.backward()
            for param_t, param, param_g, weight in zip(*upper, learned, strict=True):
                step = param_t.grad * (param_g.data - param.data)
                weight.copy_(torch.clamp(weight - eta * step, 0, 1))
            overwrite()
            each.append(value.item())
        losses.append(float(np.mean(each)))
    return temporary, dict(zip(governed, learned, strict=True)), losses
