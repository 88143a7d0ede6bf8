"""Quadratic programs on the simplex: shares that are not negative and add up to 1."""

import torch
from torch import Tensor


def minimize_on_simplex(matrices: Tensor) -> Tensor:
    """Return argmin αᵀPα over α ≥ 0 with Σα = 1, [i, j], for positive definite P, [i, j, k].

    α is x/Σx for the x ≥ 0 with Px − 1 ≥ 0, one of both 0 in every place. Block principal pivoting
    finds x: it solves for those x that are free, and frees or binds all that have the wrong sign.
    If three such exchanges do not lead to fewer wrong signs, it exchanges only the last of them,
    which comes to an end (Júdice and Pires, 1994).
    """
    count, size, _ = matrices.shape
    positions = torch.arange(size, device=matrices.device)
    unit = torch.eye(size, dtype=matrices.dtype, device=matrices.device)
    is_free = torch.ones(count, size, dtype=torch.bool, device=matrices.device)
    fewest = torch.full((count,), size + 1, device=matrices.device)
    tries = torch.full_like(fewest, 3)
    x = torch.zeros_like(matrices[:, 0])
    for _ in range(100 + 10 * size):  # rounding must not keep a server busy
        both = is_free.unsqueeze(1) & is_free.unsqueeze(2)
        x = torch.linalg.solve(torch.where(both, matrices, unit), is_free.to(matrices.dtype))
        slack = torch.einsum("ijk,ik->ij", matrices, x) - 1
        rounding = 1e-13 * torch.einsum("ijk,ik->ij", matrices.abs(), x.abs())
        is_wrong = torch.where(is_free, x < 0, slack < -rounding)
        wrong = is_wrong.sum(1)
        if not wrong.any():
            break
        tries = torch.where(wrong < fewest, 3, tries - 1)
        fewest = torch.minimum(fewest, wrong)
        last = torch.where(is_wrong, positions, -1).amax(1, keepdim=True)
        is_last = positions == last
        is_free = is_free ^ torch.where((tries >= 0).unsqueeze(1), is_wrong, is_last)
    x = x.clamp(min=0)
    return x / x.sum(1, keepdim=True)
