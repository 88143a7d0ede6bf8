"""Functions of whole stacks: called once for all lanes, whatever vmap shows to a lane."""

from typing import ClassVar

import pytest
import torch
from torch.func import grad, vmap

from fedala.lanes.stacked import call_stacked

X = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Weigh(torch.autograd.Function):
    """x·w of each lane, [lane, sample, column]; `calls` has the shapes of what it gets."""

    calls: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x, w, factor):
        Weigh.calls.append((x.shape, w.shape))
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return factor * x * w.unsqueeze(1)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return ctx.factor * grad * w.unsqueeze(1), ctx.factor * (grad * x).sum(1), None


def weigh(x, w):
    return call_stacked(Weigh.apply, (x, w), (2.0,))


@pytest.fixture(autouse=True)
def calls():
    Weigh.calls.clear()
    return Weigh.calls


def test_outside_vmap_there_is_one_lane(calls):
    assert torch.equal(weigh(X[0], W[0]), 2 * X[0] * W[0])
    assert calls == [((1, 4, 5), (1, 5))]


@pytest.mark.parametrize(
    ("in_dims", "x", "w"),
    [
        ((0, 0), X, W),
        ((1, 0), X.movedim(0, 1), W),
        ((2, 1), X.movedim(0, 2), W.movedim(0, 1)),
        ((0, None), X, W[0]),
        ((None, 0), X[0], W),
    ],
)
def test_all_lanes_are_one_call_and_one_gradient(calls, in_dims, x, w):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    found = vmap(weigh, in_dims)(x, w)
    assert calls == [((3, 4, 5), (3, 5))]
    lanes = [
        2 * (x if dx is None else x.select(dx, lane)) * (w if dw is None else w.select(dw, lane))
        for lane in range(3)
        for dx, dw in [in_dims]
    ]
    expected = torch.stack(lanes)
    assert torch.equal(found, expected)
    slopes = torch.randn(expected.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, (x, w), slopes)
    for a, b in zip(torch.autograd.grad(found, (x, w), slopes), wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-14)


def test_a_missing_tensor_stays_missing():
    def add(x, bias):
        assert bias is None
        return x + 1

    assert torch.equal(vmap(lambda x: call_stacked(add, (x, None), ()))(X), X + 1)


def test_an_inner_vmap_of_something_else_leaves_the_lanes_alone(calls):
    """A model may use vmap itself, within a lane."""

    def model(x, w):
        return vmap(lambda number: weigh(x, w).sum() * number)(torch.arange(2.0))

    found = vmap(model)(X, W)
    assert calls == [((3, 4, 5), (3, 5))]
    totals = (2 * X * W.unsqueeze(1)).sum((1, 2))
    assert torch.allclose(found, torch.stack([0 * totals, totals], 1), rtol=1e-14)


def test_an_inner_gradient_of_something_else_leaves_the_lanes_alone(calls):
    """A model may use `torch.func.grad` within a lane."""

    def model(x, w):
        return grad(lambda v: (weigh(x * 1, w) * v).sum())(x.mean(0))

    w = W.clone().requires_grad_()
    found = vmap(model)(X, w)
    assert calls == [((3, 4, 5), (3, 5))]
    assert torch.allclose(found, (2 * X * w.unsqueeze(1)).sum(1), rtol=1e-14)
    [slopes] = torch.autograd.grad(found.sum(), w)
    assert torch.allclose(slopes, 2 * X.sum(1), rtol=1e-14)


def test_an_inner_gradient_of_a_stacked_function_is_refused():
    with pytest.raises(RuntimeError):
        vmap(lambda x, w: grad(lambda v: weigh(x, v).sum())(w))(X, W)
