"""What the score of a run measures, and whether more of it is better."""

import math
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """What a score is: a sum over samples, divided by their number."""

    name: str
    """Its column in `history.csv`."""
    title: str
    higher_is_better: bool = True
    is_share: bool = True
    """Whether it is from 0 to 1, and shown in percent."""

    @property
    def columns(self) -> dict[str, str]:
        """The columns of `history.csv`, by the fields of a `HistoryRow`."""
        ends = ("", "_joined", "_validation")
        return {f"score{end}": f"{self.name}{end}" for end in ends}

    @property
    def scale(self) -> int:
        """What a score is multiplied with before it is shown."""
        return 100 if self.is_share else 1

    @property
    def unit(self) -> str:
        return " %" if self.is_share else ""

    @property
    def superlative(self) -> str:
        return "highest" if self.higher_is_better else "lowest"

    @property
    def heading(self) -> str:
        """The title of a table's figures, such as `accuracy in %`."""
        return f"{self.title} in %" if self.is_share else self.title

    def format(self, score: float) -> str:
        """Return a score as tables show it, without its unit."""
        return f"{100 * score:.2f}" if self.is_share else f"{score:.4g}"

    def pick_best(self, scores: Iterable[float]) -> float:
        """Return the best of the scores that are not NaN; NaN if there is none."""
        known = [score for score in scores if not math.isnan(score)]
        choose = max if self.higher_is_better else min
        return choose(known, default=math.nan)


ACCURACY = Metric("accuracy", "accuracy")
LABEL_ACCURACY = Metric("label_accuracy", "label accuracy")
MSE = Metric("mse", "mean squared error", higher_is_better=False, is_share=False)
MAE = Metric("mae", "mean absolute error", higher_is_better=False, is_share=False)
OWN_LOSS = Metric("own_loss", "own loss", higher_is_better=False, is_share=False)

#: Not the score of a run, but what may pick its best round.
LOSS = Metric("loss", "loss", higher_is_better=False, is_share=False)

#: What single predictions say beside the score: of classes, and of numbers.
F1 = Metric("f1", "macro F1")
BALANCED_ACCURACY = Metric("balanced_accuracy", "balanced accuracy")
AUC = Metric("auc", "AUC")
CALIBRATION_ERROR = Metric("ece", "calibration error", higher_is_better=False)
RMSE = Metric("rmse", "RMSE", higher_is_better=False, is_share=False)
R_SQUARED = Metric("r2", "R²", is_share=False)

METRICS = (ACCURACY, LABEL_ACCURACY, MSE, MAE, OWN_LOSS)
SHARES = tuple(metric.name for metric in METRICS if metric.is_share)


def describe_majority(shares: Collection[float], whose: str = "") -> str:
    """Return what a model scores that always answers with one class: the least and the most.

    `whose` samples they are may follow the class.
    """
    texts = dict.fromkeys(map(ACCURACY.format, (min(shares), max(shares))))
    return f"always the most frequent class{whose}: {' to '.join(texts)}{ACCURACY.unit}"


def find_metric(columns: Container[str]) -> Metric:
    """Return the metric that a table has a column of; accuracy if it has none."""
    return next((metric for metric in METRICS if metric.name in columns), ACCURACY)
