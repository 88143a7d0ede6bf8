"""What a result says of itself: text, HTML, frames, plots. Nothing that is printed is long."""

import numpy as np
import pytest
import torch

from fedala import Result, UserError
from fedala.ala import Report
from fedala.data import Dataset, federate
from fedala.lanes.messages import Message
from fedala.lanes.uploads import Uploads
from fedala.methods import ServerRound
from fedala.metrics import MSE
from fedala.records import Evaluation, HistoryRow, PersonalModel
from fedala.runs.config import Config
from fedala.runs.results import MethodResult


def make_method(name, *scores, validation=None, title=None, metric=None):
    """Return a method with two seeds; the second scores 0.1 more."""
    rows = []
    for round, score in enumerate(scores):
        for seed in (0, 1):
            held_out = None if validation is None else validation[round]
            own = score + 0.1 * seed
            row = HistoryRow(
                seed, round, own, 1.5, own, held_out, seconds=2.0,
                **({"metric": metric} if metric else {}),
            )  # fmt: skip
            rows.append(row)
    models = {(0, client): {"w": torch.zeros(1000)} for client in range(100)}
    result = MethodResult(name, title or name.upper(), rows, models)
    for seed in (0, 1):
        counts = np.array([[3.0, 1.0, 4.0], [0.0, 0.0, 0.0]])
        result.add_clients(seed, counts)
    return result


def make_result(*methods, **options):
    config = Config(dataset="digits", clients=2, rounds=3, seeds=2)
    return Result(config, {method.method: method for method in methods}, **options)


TWO = make_result(make_method("a", 0.1, 0.6, 0.5, 0.4), make_method("b", 0.1, 0.2, 0.3, 0.3))


def test_the_text_has_the_figures_of_every_method():
    first, heads, a, b, best = repr(TWO).splitlines()
    assert first == "digits: 2 clients, 3 rounds, 2 runs of each method"
    assert heads.split("  ")[0] == "accuracy in %"
    assert a.split() == ["A", "65.00", "±", "5.00", "45.00", "±", "5.00", "2", "8"]
    assert b.split()[1] == "35.00"
    assert best == "A has the highest accuracy in the best round, which is picked on test data."
    assert len({len(line) for line in (heads, a, b)}) == 1


def test_the_best_method_is_that_of_the_validated_round_if_all_have_one():
    assert TWO.best.method == "a"
    a = make_method("a", 0.1, 0.6, 0.2, validation=[0.1, 0.2, 0.9])
    b = make_method("b", 0.1, 0.3, 0.4, validation=[0.1, 0.2, 0.9])
    assert make_result(a, b).best is b
    assert "in the round that the validation samples pick" in repr(make_result(a, b))
    assert make_result(a, TWO.methods["b"]).best is a
    low, high = make_method("low", 2.0, 1.0, metric=MSE), make_method("high", 3.0, metric=MSE)
    assert make_result(high, low).best is low
    nothing = make_result(make_method("a", float("nan")), MethodResult("b", "B"))
    assert nothing.best is None
    assert make_result(MethodResult("b", "B")).best is None
    assert repr(make_result(MethodResult("b", "B"))).startswith("digits")


def test_the_html_holds_the_same_and_escapes():
    page = make_result(make_method("x", 0.5, title="<script>alert(1)</script>"))._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "55.00 ± 5.00" in page
    assert len(page) < 1000


def test_frames_have_a_row_for_every_evaluation_and_client():
    pytest.importorskip("pandas")
    frame = TWO.to_frame()
    assert len(frame) == 2 * 2 * 4
    row = frame[(frame.method == "b") & (frame.seed == 1) & (frame["round"] == 2)].iloc[0]
    assert row.accuracy == pytest.approx(0.4)
    assert row.seconds == 2.0
    clients = TWO.clients_frame()
    assert list(clients.columns) == ["method", "seed", "client", "accuracy", "samples"]
    assert clients[clients.client == 0].accuracy.tolist() == [0.75] * 4
    assert clients[clients.client == 1].accuracy.isna().all()  # it has no test samples


def test_without_pandas_there_is_one_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UserError, match="A frame needs pandas: pip install 'fedala"):
        TWO.to_frame()


def test_the_plot_draws_the_mean_of_every_method():
    figure = TWO.plot()
    [axes] = figure.axes
    assert [line.get_label() for line in axes.lines] == ["A", "B"]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [15, 65, 55, 45])
    assert axes.get_ylabel() == "test accuracy, %"
    assert figure._repr_png_().startswith(b"\x89PNG")  # a notebook shows it
    np.testing.assert_allclose(TWO.plot("loss").axes[0].lines[1].get_ydata(), [1.5] * 4)
    with pytest.raises(UserError, match="There is no column 'losses'; there are accuracy, loss"):
        TWO.plot("losses")
    with pytest.raises(UserError, match="nothing to plot yet"):
        make_result(MethodResult("b", "B")).plot()


def test_a_page_needs_a_folder():
    with pytest.raises(UserError, match=r"keep it with run\(out=…\)"):
        TWO.report()


def test_nothing_that_is_printed_is_long_or_shows_weights():
    many = {f"w{k}": torch.zeros(20, 50, 50) for k in range(30)}
    message = Message(many, {"more": {"c": torch.zeros(20, 9)}})
    images = torch.zeros(1797, 1, 28, 28, dtype=torch.uint8)
    data = Dataset("digits", images, torch.arange(1797) % 10, 10)
    federation = federate(data, "iid", 20)
    methods = [make_method(f"method-{k}", 0.5, title=f"A method {k}" * 3) for k in range(60)]
    shown = [
        make_result(*methods),
        methods[0],
        message,
        Uploads(list(range(500)), torch.ones(500), []),
        PersonalModel(0, 1, many),
        Evaluation(methods[0].history[0], np.zeros((1000, 3))),
        ServerRound(0, 1, 10, list(range(1000)), list(range(1000))),
        Report(100, tuple([0.5] * 100), True, False, True, 0.5),
        data,
        federation,
        Config(set={f"fedala.{k}": k for k in range(100)}),
        methods[0].history[0],
    ]
    for one in shown:
        assert len(repr(one)) <= 1000, type(one)
        assert "tensor(" not in repr(one)
        assert "array(" not in repr(one)
    assert repr(data) == "<Dataset digits: 1,797 samples of 10 classes, 1×28×28>"
    assert (
        repr(federation) == "<Federation digits: 1,797 samples of 10 classes, 1×28×28, 20 clients>"
    )
    assert repr(Config(lr=0.5, rounds=3)) == "Config(rounds=3, lr=0.5)"
    assert repr(message) == "<Message of 31 tensors, 75,009 numbers a lane>"
