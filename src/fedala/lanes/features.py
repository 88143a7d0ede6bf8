"""Features under the upper layers, computed once for lanes that share their lower layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedala.errors import UserError
from fedala.lanes.layers import Cut
from fedala.lanes.outputs import keep_tensors
from fedala.lanes.samples import Groups, Samples
from fedala.lanes.task import Task
from fedala.lanes.trees import Params, count_lanes, tree_map


@dataclass(frozen=True)
class Sharing:
    """Which model each lane received: lanes that received the same one share its work."""

    received: Params = field(default_factory=dict)
    """[lane, …]; the tensors that were given to the method."""
    source: Sequence[int] = ()
    """[lane]: the number of the model that it received."""

    def count_own_layers(self, task: Task, params: Params) -> int:
        """Return how many upper layers are not the received ones.

        A layer is a received one if its tensors are the very objects that the method was given.
        """
        own = len(task.layers)
        while own and all(params[name] is self.received.get(name) for name in task.layers[own - 1]):
            own -= 1
        return own

    def group_lanes(self, lanes: Sequence[int]) -> Groups:
        """Group positions in `lanes` by the model that these lanes received."""
        groups: dict[int, list[int]] = {}
        for position, lane in enumerate(lanes):
            groups.setdefault(self.source[lane], []).append(position)
        return tuple(map(tuple, groups.values()))


@torch.no_grad()
def compute_features(
    task: Task,
    cut: Cut,
    params: Params,
    samples: Samples,
    sharing: Sharing,
    lanes: Sequence[int],
) -> tuple[Any, Tensor]:
    """Return a table of what enters the upper layers, and each sample's row in it.

    The rows are [lane, sample]. `lanes[i]` is the lane of the i-th line of `samples`. Lanes whose
    lower layers are the same received model run together, in large batches. If the model cannot be
    cut, the table is None, and the rows are positions in the dataset.
    """
    if not cut.cuts:
        return None, samples.matrix
    is_received = sharing.count_own_layers(task, params) <= cut.p
    if is_received and sharing.source:
        groups = sharing.group_lanes(lanes)
    else:
        groups = tuple((position,) for position in range(len(lanes)))
    rows_of_group, rows = samples.group(groups)
    table = []
    for group, own in zip(groups, rows_of_group, strict=True):
        lane = lanes[group[0]]
        state = {
            name: task.lay_out(value[lane].unsqueeze(0)).squeeze(0)
            for name, value in params.items()
        }
        for chunk in torch.split(own, task.chunk):
            if len(chunk):
                with task.autocast():
                    found = cut.lower(state, task.inputs(chunk))
                # With nothing above the cut, these are outputs: an object, a dict or a tuple, too.
                table.append(found if cut.p else keep_tensors(task.loss.select(found)))
    return tree_map(lambda *parts: torch.cat(parts), *table) if table else None, rows


def select_rows(task: Task, table: Any, rows: Tensor) -> Any:
    """Return rows of a table of `compute_features`."""
    return task.inputs(rows) if table is None else tree_map(lambda t: t[rows], table)


@dataclass
class FeatureBatches:
    """Batches of a training on features, in the order of an epoch; at first, as they stand."""

    task: Task
    table: Any
    positions: Tensor
    """[lane, sample]: rows of the table."""
    rows: Tensor
    """[lane, sample]: rows of the dataset."""

    def __post_init__(self) -> None:
        self._positions, self._rows = self.positions, self.rows

    def begin_epoch(self, order: Tensor) -> None:
        """Set the samples of an epoch, [lane, sample], counted among a lane's own, and padded."""
        self._positions, self._rows = self.positions.gather(1, order), self.rows.gather(1, order)

    def __call__(self, lanes: slice, columns: slice) -> tuple[Any, Any]:
        x = select_rows(self.task, self.table, self._positions[lanes, columns])
        return x, self.task.targets(self._rows[lanes, columns])


def compute_loss(task: Task, cut: Cut, model: Params, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Return one lane's features, [sample, …], and its loss."""
    features = cut.lower(model, x)
    return features, task.loss(task.loss.select(cut.upper(model, features)), y)


def find_last_cut(task: Task, params: Params, title: str) -> Cut:
    """Return the cut below the last layer, for the method with this title.

    A module that is not ours shows on two samples that it can be cut there.
    """
    rows = torch.arange(2, device=task.device) % max(1, count_lanes(task.x))
    # The trial compares outputs, so those of a model that has diverged must be numbers as well.
    bounded = {name: value[0].nan_to_num().clamp(-1, 1) for name, value in params.items()}
    probe = bounded, task.inputs(rows)
    with task.use_mode(training=False), torch.no_grad():
        cut = Cut(task.model, 1, probe)
    if cut.p != 1:
        raise UserError(
            f"{title} works with what enters the last layer, and this model's last layer cannot "
            "be cut off: the model must return that layer's output as it is, and the layer must "
            "share no parameters with another."
        )
    return cut
