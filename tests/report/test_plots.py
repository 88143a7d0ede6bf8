"""Plots: circles, curves and points are at the right values."""

import numpy as np
import pytest
from folders import accuracy, made_up

from fedala.data import federate, load
from fedala.errors import UserError
from fedala.report import plots
from fedala.report.runs import find_runs


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (20, 10), (100, 100)])
def test_one_circle_for_each_client_and_class_with_samples(clients, classes):
    random = np.random.default_rng(0)
    counts = random.integers(0, 500, (clients, classes)) * random.integers(0, 2, (clients, classes))
    counts[0, 0] = 1
    [axes] = plots.draw_split(counts).axes
    circles = axes.collections[0]
    points = circles.get_offsets().astype(int)
    assert len(points) == np.count_nonzero(counts)
    samples = counts[points[:, 0], points[:, 1]]  # x = client, y = class
    np.testing.assert_allclose(circles.get_sizes() / samples, circles.get_sizes()[0] / samples[0])


def test_class_names_label_the_axis(tmp_path):
    digits = load("digits")
    figure = plots.draw_split(
        federate(digits, "dir:0.1", 5).counts(), ["zero", *"123456789"], "digits"
    )
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "zero",
        *"123456789",
    ]
    plots.save(figure, tmp_path / "split.svg")
    assert "<svg" in (tmp_path / "split.svg").read_text(encoding="utf-8")


def test_a_plot_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        plots.save(plots.draw_split(np.eye(2, dtype=int)), tmp_path / "no" / "x.png")


def test_legends_round_down():
    assert [plots._round_down(number) for number in (0.4, 1, 9.9, 64, 161, 2300)] == [
        1,
        1,
        9,
        60,
        100,
        2000,
    ]


def test_a_curve_is_the_mean_and_its_band_one_deviation():
    values = np.array([[1.0, 2.0, 3.0], [3.0, 4.0, 7.0]])
    [axes] = plots.draw_curves({"a": ([0, 5, 10], values), "b": ([0, 5], values[:1, :2])}, "y").axes
    assert axes.lines[0].get_ydata().tolist() == [2, 3, 5]
    assert axes.lines[0].get_xdata().tolist() == [0, 5, 10]
    [band] = axes.collections  # a single run has none
    edges = {tuple(point) for point in band.get_paths()[0].vertices}
    assert {(0, 1), (0, 3), (5, 2), (5, 4), (10, 3), (10, 7)} <= edges
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


def test_every_client_and_method_is_a_point():
    values = {"a": np.array([0.5, np.nan, 0.75]), "b": np.array([1.0, 0.25, np.nan])}
    [axes] = plots.draw_client_scores(values).axes
    for label, own in values.items():
        [points] = [c for c in axes.collections if c.get_label() == label]
        found = np.ma.filled(points.get_offsets()[:, 1], np.nan)
        np.testing.assert_allclose(found, 100 * own)


def test_plots_are_written_as_png_and_pdf(tmp_path):
    folder = made_up(tmp_path / "run", ("ditto+ala", "../evil/name", "fedavg"), seeds=2, rounds=4)
    [run] = find_runs([folder.path])
    figures = plots.draw_runs([run])
    wanted = np.mean([100 * accuracy("fedavg", seed, 4) for seed in (0, 1)])
    assert figures["accuracy"].axes[0].lines[2].get_ydata()[-1] == pytest.approx(wanted)
    picture = figures["weights-histogram-fc.bias-Ditto+ALA"].axes[0].images[0].get_array()
    np.testing.assert_allclose(picture.sum(0), 100, rtol=1e-4)  # of every recorded round
    written = plots.write_all([run], tmp_path / "plots")
    assert sorted(written) == sorted((tmp_path / "plots").iterdir())
    assert len(written) == 2 * len(figures)
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"%PDF")


def test_a_run_that_has_just_begun_can_be_drawn(tmp_path):
    folder = made_up(tmp_path / "run", ("fedavg",), seeds=1, rounds=3, reached=0)
    assert set(plots.draw_runs(find_runs([folder.path]))) == {"accuracy", "loss", "split"}


def test_a_split_that_several_runs_have_is_drawn_once(tmp_path):
    folders = [made_up(tmp_path / name, (name,)).path for name in ("fedavg", "fedala")]
    assert [name for name in plots.draw_runs(find_runs(folders)) if name.startswith("split")] == [
        "split"
    ]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    folder = made_up(tmp_path / "run", ("fedavg",))
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="for the plots cannot be made"):
        plots.write_all(find_runs([folder.path]), tmp_path / "file")
