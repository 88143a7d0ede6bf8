"""Variants of a method that run side by side: the points of a sweep, as lanes.

Variants may differ in numbers. In a cohort with lanes of several variants, such a number is [lane].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from fedala.lanes import Recipe
from fedala.lanes.recipe import is_constant
from fedala.methods import Method

T = TypeVar("T")
Spread = Callable[[Sequence[float]], Tensor]


@dataclass(frozen=True)
class Variant:
    """A method with its hyperparameters, and how its clients train."""

    method: Method
    recipe: Recipe


def can_run_together(a: Variant, b: Variant) -> bool:
    """Tell whether two variants can be lanes of one tensor program."""
    first, second = a.recipe.optimizer, b.recipe.optimizer
    is_same_rule = (first.kind, first.nesterov) == (second.kind, second.nesterov)
    return is_same_rule and _differ_in_lane_numbers(a.method, b.method)


def _differ_in_lane_numbers(a: Any, b: Any) -> bool:
    """Tell whether two methods, or parts of them, are equal except for lane numbers."""
    if type(a) is not type(b):
        return False
    for field in fields(a):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if is_dataclass(one):
            if not _differ_in_lane_numbers(one, other):
                return False
        elif one != other and not (
            _may_differ(a, field.name) and isinstance(one, float) and isinstance(other, float)
        ):
            return False
    return True


def _may_differ(method: Any, name: str) -> bool:
    numbers: frozenset[str] = getattr(method, "lane_numbers", frozenset())
    return name in numbers or bool(getattr(method, "sends_model_stack", False))


def merge(parts: Sequence[T], spread: Spread) -> T:
    """Return one method for lanes of several: its differing numbers are [lane].

    `parts` has each lane's method.
    """
    first: Any = parts[0]
    if is_constant(parts):
        return parts[0]
    changes: dict[str, Any] = {}
    for field in fields(first):
        values = [getattr(part, field.name) for part in parts]
        if is_dataclass(values[0]):
            changes[field.name] = merge(values, spread)
        elif not is_constant(values):
            changes[field.name] = spread(values)
    merged: T = replace(first, **changes)
    return merged
