"""Lanes: clients that work side by side as one tensor program. What a method is written with."""

from fedala.lanes.cohort import Cohort
from fedala.lanes.combinations import Combination
from fedala.lanes.late_gradients import Gradients
from fedala.lanes.messages import Message
from fedala.lanes.optimizers import UpdateRule, densify, descend, pull, scale_gradients, try_step
from fedala.lanes.recipe import Optimizer, Recipe, Schedule
from fedala.lanes.task import Task
from fedala.lanes.trees import Number, Params, State, align, broadcast_lanes, interpolate, tree_map
from fedala.lanes.uploads import Uploads

__all__ = [
    "Cohort",
    "Combination",
    "Gradients",
    "Message",
    "Number",
    "Optimizer",
    "Params",
    "Recipe",
    "Schedule",
    "State",
    "Task",
    "UpdateRule",
    "Uploads",
    "align",
    "broadcast_lanes",
    "densify",
    "descend",
    "interpolate",
    "pull",
    "scale_gradients",
    "tree_map",
    "try_step",
]
