"""The paper's figures show what the runs learned."""

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedala.cells.running import DataCache
from fedala.errors import UserError
from fedala.paper import figures
from fedala.paper.experiments import drawings, settings
from fedala.runs.build import build_simulation
from fedala.runs.observer import Stopped


def draw(name, data, out, **changes):
    """Draw a figure on the small data; return the lines of its csv and the files."""
    options = {key: changes.pop(key) for key in ("rounds", "should_stop") if key in changes}
    drawing = replace(drawings()[name], **changes)
    slower = tuple(replace(setting, lr=0.01) for setting in drawing.settings)
    written = figures.draw(
        replace(drawing, settings=slower), DataCache(data), out, device="cpu", **options
    )
    assert all(path.stat().st_size > 0 for path in written)
    with next(path for path in written if path.suffix == ".csv").open(
        newline="", encoding="utf-8"
    ) as file:
        return list(csv.DictReader(file)), written


def test_weight_learning_has_an_initial_stage_and_then_six_epochs_a_round(data, tmp_path):
    rows, written = draw("figure-wl", data, tmp_path, rounds=3)
    epochs = {i: [int(r["epoch"]) for r in rows if r["iteration"] == str(i)] for i in (1, 2, 3, 4)}
    assert epochs[1] == []  # the two models are equal
    assert len(epochs[2]) >= 11
    assert epochs[3] == epochs[4] == [1, 2, 3, 4, 5, 6]
    assert {row["dataset"] for row in rows} == {"mnist"}  # there is no CIFAR-10 here
    assert {path.suffix for path in written} == {".png", ".pdf", ".csv"}


def test_the_losses_of_convergence_are_those_of_the_models(data, tmp_path):
    rows, _ = draw("figure-con", data, tmp_path, rounds=2, every=1)
    assert [(row["iteration"], row["model"]) for row in rows] == [
        ("1", "initialised"),
        ("1", "trained"),
        ("2", "initialised"),
        ("2", "trained"),
    ]
    # The first is Θ⁰ on all training samples, computed plainly.
    setting = replace(settings()["mnist-pathological"], lr=0.01)
    options = {"rounds": 1, "device": "cpu"}
    request = figures.Request(drawings()["figure-con"], DataCache(data), options, lambda: False)
    checked = request.plan("fedala", setting)
    simulation = build_simulation(checked, checked.methods[0])
    model = checked.make_model()
    model.load_state_dict({name: value[0] for name, value in simulation.initial[0].items()})
    samples = torch.from_numpy(np.concatenate(simulation.task.parts["train"]))
    loss = F.cross_entropy(
        model(simulation.task.inputs(samples)), simulation.task.targets(samples)
    ).item()
    assert float(rows[0]["loss"]) == pytest.approx(loss, rel=1e-4)
    assert float(rows[1]["loss"]) < float(rows[0]["loss"])


def test_the_two_paths_are_equal_until_ala_is_switched_on(data, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "_GRID", 3)
    rows, _ = draw("figure-traj", data, tmp_path, rounds=4, first=2, set={"fedala.start_round": 4})
    places = {
        (row["method"], int(row["iteration"]), row["model"]): np.array(
            [float(row["c1"]), float(row["c2"])]
        )
        for row in rows
    }
    assert len(places) == 2 * 3 * 2
    spread = max(np.linalg.norm(place) for place in places.values())
    for (method, iteration, model), place in places.items():
        distance = np.linalg.norm(
            place - places["fedavg" if method == "fedala" else "fedala", iteration, model]
        )
        assert distance < 1e-4 * spread if iteration < 4 else distance > 1e-3 * spread


def test_the_principal_plane_contains_the_points_of_a_plane():
    torch.manual_seed(0)
    plane, _ = torch.linalg.qr(torch.randn(50, 2, dtype=torch.float64))
    inside = torch.randn(8, 2, dtype=torch.float64) * torch.tensor([3.0, 1.0])
    found = figures.find_principal_plane(inside @ plane.T + 5)
    torch.testing.assert_close(found.mean + found.points @ found.components, inside @ plane.T + 5)
    torch.testing.assert_close(
        found.components @ found.components.T, torch.eye(2, dtype=torch.float64)
    )
    assert found.points[:, 0].var() > found.points[:, 1].var()


def test_splits_of_missing_data_are_left_out(data, tmp_path):
    _, written = draw("figure-splits", data, tmp_path)
    assert [path.name for path in written if path.suffix == ".png"] == [
        "figure-splits-mnist-pathological.png",
        "figure-splits-mnist-dir.png",
    ]


@pytest.mark.parametrize("name", ["figure-wl", "figure-con", "figure-traj"])
def test_out_of_time_a_figure_stops_between_two_rounds_and_is_not_written(name, data, tmp_path):
    few = {"first": 1, "set": {"fedala.start_round": 1}} if name == "figure-traj" else {}
    answers = iter([False, False, True])  # asked before rounds 1, 2 and 3
    with pytest.raises(Stopped, match="2 of 5 rounds of "):
        draw(name, data, tmp_path, rounds=5, should_stop=lambda: next(answers), **few)
    assert list(tmp_path.iterdir()) == []


def test_time_is_checked_before_a_round_and_not_after_the_last(data, tmp_path):
    answers = iter(
        [False, False, True]
    )  # before the two rounds of FedAvg, and before the first of FedALA
    with pytest.raises(Stopped, match="0 of 2 rounds of FedALA"):
        draw("figure-traj", data, tmp_path, rounds=2, first=1, should_stop=lambda: next(answers))
    answers = iter([False, False])
    draw("figure-con", data, tmp_path, rounds=2, should_stop=lambda: next(answers))


def test_refusals(data, tmp_path):
    with pytest.raises(UserError, match="There is no copy of mnist"):
        figures.draw(drawings()["figure-con"], DataCache(tmp_path), tmp_path / "figures")
    with pytest.raises(UserError, match="it needs more than 140 rounds"):
        figures.draw(drawings()["figure-traj"], DataCache(data), tmp_path / "figures", rounds=140)


def test_every_figure_can_be_drawn_of_digits_and_of_the_papers_data():
    assert set(drawings()) == set(figures._MAKERS)
    for small, whole in zip(drawings(digits=True).values(), drawings().values(), strict=True):
        assert {setting.dataset for setting in small.settings} == {"digits"}
        assert "digits" not in {setting.dataset for setting in whole.settings}
        assert small.rounds <= whole.rounds
