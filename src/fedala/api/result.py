"""What `fedala.run` returns: figures, frames, plots and the page of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedala.api.tables import make_html, make_text
from fedala.errors import UserError, import_optional
from fedala.report import page, plots
from fedala.report.curves import TITLES, collect_curves, list_columns
from fedala.runs.leaders import find_best
from fedala.runs.results import MethodResult, RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(repr=False)
class Result(RunResult):
    """The results of a run. Print it to see a table of its methods.

    ```python
    result = fedala.run(method="fedala,fedavg", dataset="digits", rounds=20)
    result                            # a table: best round, last round, seconds
    result.best                       # the method with the best score
    result.methods["fedala"].history  # every evaluation
    result.to_frame()                 # the same of all methods, for pandas
    result.clients_frame()            # every client's score at the last evaluation
    result.plot()                     # learning curves, for matplotlib
    result.report()                   # the HTML page of a run folder
    result.notes                      # what was found in the data, and what was decided
    ```

    With a single method, `result.history`, `result.best_accuracy` and `result.models` are its own.
    """

    message: str = ""
    """If the run was interrupted: after which round, and how to resume it."""
    notes: tuple[str, ...] = ()
    """Sentences: what the run found in the data, and what it decided. `fedala run` prints them."""

    @property
    def is_complete(self) -> bool:
        """Tell whether all rounds have been run; `message` says why not."""
        return not self.message

    @property
    def best(self) -> MethodResult | None:
        """The method with the best score; `result.best.method` is its name.

        If the run has validation samples, they pick the round of each method that is compared.
        Otherwise, it is the best round on test data, which is optimistic. None if no score is a
        number.
        """
        return find_best(list(self.methods.values()))[1]

    def to_frame(self) -> "DataFrame":
        """Return every evaluation of every method as a pandas frame: the columns of history.csv.

        `result.to_frame().pivot_table(index="round", columns="method", values="accuracy")`
        """
        rows = []
        for name, method in self.methods.items():
            rows += [{"method": name, **row.columns()} for row in method.history]
        return self._make_frame(rows)

    def clients_frame(self) -> "DataFrame":
        """Return every client's score at the last evaluation of each run as a pandas frame.

        `result.clients_frame().groupby("method").accuracy.describe()`. Methods that have not come
        to their last evaluation are missing.
        """
        rows = []
        for name, method in self.methods.items():
            for seed, scores in method.client_means.items():
                counts = method.client_scores.get(seed)
                for client, score in enumerate(scores):
                    row = {"method": name, "seed": seed, "client": client}
                    row[method.metric.name] = float(score)
                    if counts is not None:
                        row["samples"] = int(counts[client, 2])
                    if self.client_names:
                        row["client_name"] = self.client_names[client]
                    rows.append(row)
        return self._make_frame(rows)

    @staticmethod
    def _make_frame(rows: Sequence[dict[str, Any]]) -> "DataFrame":
        pandas = import_optional("pandas", "pandas", "notebook", "A frame")
        frame: DataFrame = pandas.DataFrame(rows)
        return frame

    def plot(self, column: str | None = None) -> "Figure":
        """Return the learning curves of all methods as a matplotlib figure.

        A curve is the mean over the runs, and its band one standard deviation. `column` is one of
        history.csv; without it, the score. `result.plot("loss").savefig("loss.pdf")`
        """
        import_optional("matplotlib", "matplotlib", "plots", "Plotting")
        shown = [method for method in self.methods.values() if method.history]
        if not shown:
            raise UserError("There is nothing to plot yet: no round has been evaluated.")
        metric = shown[0].metric
        known = list(dict.fromkeys(name for one in shown for name in list_columns(one)))
        column = column or metric.name
        if column not in known:
            raise UserError(f"There is no column {column!r}; there are {', '.join(known)}.")
        is_share = metric.is_share and column.startswith(metric.name)
        curves = {}
        for method in shown:
            if column in list_columns(method):
                rounds, values = collect_curves(method, column)
                curves[method.title] = rounds, (100 if is_share else 1) * values
        return plots.draw_curves(curves, TITLES.get(column, column) + (", %" if is_share else ""))

    def report(self, path: Path | str | None = None) -> Path:
        """Write the HTML page of the run, and return its path.

        Without `path`, it is report.html in the run folder.
        """
        if self.folder is None:
            raise UserError(
                "The page is made from a run folder, and this run has none: "
                "keep it with run(out=…), such as run(out='runs/mine')."
            )
        return page.write([self.folder], Path(path) if path else None)

    def __repr__(self) -> str:
        return make_text(self, self.notes, self.message)

    def _repr_html_(self) -> str:
        return make_html(self, self.notes, self.message)
