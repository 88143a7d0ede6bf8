"""The bubble plot: one circle for each client and class that meet, its area the number of samples."""

import numpy as np
import pytest

from fedala.data import federate, load
from fedala.errors import UserError
from fedala.report import plots


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (20, 10), (100, 100)])
def test_one_bubble_for_each_client_and_class_that_meet(clients, classes):
    random = np.random.default_rng(0)
    counts = random.integers(0, 500, (clients, classes)) * random.integers(0, 2, (clients, classes))
    counts[0, 0] = 1
    [axes] = plots.bubbles(counts).axes
    circles = axes.collections[0]
    places = circles.get_offsets().astype(int)
    assert len(places) == np.count_nonzero(counts)
    held = counts[places[:, 0], places[:, 1]]  # x = client, y = class
    np.testing.assert_allclose(circles.get_sizes() / held, circles.get_sizes()[0] / held[0])


def test_class_names_stand_at_the_axis(tmp_path):
    digits = load("digits")
    figure = plots.bubbles(federate(digits, "dir:0.1", 5).counts(), ["zero", *"123456789"], "digits")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["zero", *"123456789"]
    plots.save(figure, tmp_path / "split.svg")
    assert "<svg" in (tmp_path / "split.svg").read_text(encoding="utf-8")


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        plots.save(plots.bubbles(np.eye(2, dtype=int)), tmp_path / "no" / "x.png")


def test_legends_round_down():
    assert [plots._round_down(number) for number in (0.4, 1, 9.9, 64, 161, 2300)] == [1, 1, 9, 60, 100, 2000]
