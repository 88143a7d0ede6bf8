"""From a model's outputs to answers: labels, probabilities, numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedala.data.preprocessing import Preprocessing
from fedala.errors import UserError
from fedala.metrics import LABEL_ACCURACY, Metric

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Answers:
    """What a model says of some samples."""

    outputs: Tensor
    """[sample, output]"""
    kind: str
    """`classes`, `labels` or `numbers`."""
    class_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, outputs: Tensor, preprocessing: Preprocessing, metric: Metric) -> "Answers":
        kind = "labels" if metric == LABEL_ACCURACY else preprocessing.targets
        if kind != "numbers" and outputs.ndim == 1:
            outputs = outputs.unsqueeze(1)
        return cls(outputs, kind, preprocessing.class_names)

    def predictions(self) -> Array:
        """Return the class of each sample by name, or by number if classes have none.

        Labels are a matrix of zeros and ones, and numbers the outputs as they are.
        """
        if self.kind == "classes":
            best: Array = self.outputs.argmax(1).numpy()
            return np.array(self.names)[best] if self.class_names else best
        if self.kind == "labels":
            return (self.outputs > 0).long().numpy()
        single = self.outputs.ndim == 2 and self.outputs.shape[1] == 1
        numbers: Array = (self.outputs.squeeze(1) if single else self.outputs).numpy()
        return numbers

    def probabilities(self) -> Array:
        """Return the probability of each class or label, [sample, class]."""
        if self.kind == "numbers":
            raise UserError("This model predicts numbers: they have no probabilities.")
        scores = self.outputs.softmax(1) if self.kind == "classes" else self.outputs.sigmoid()
        found: Array = scores.numpy()
        return found

    @property
    def names(self) -> Sequence[str]:
        """The names of the outputs; numbers if there are none."""
        width = self.outputs.shape[1] if self.outputs.ndim == 2 else 1
        return [*self.class_names, *map(str, range(len(self.class_names), width))]
