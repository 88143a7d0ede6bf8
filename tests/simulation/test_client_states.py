"""Where clients' state lives: on the device, in memory, in files; it comes back as it was."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from small import assert_close, ragged_task, simulate

from fedala.lanes.trees import count_bytes, leaves
from fedala.simulation.client_states import ClientStates


def state_of_lanes(*values):
    return {
        "base": {},
        "local": {"w": torch.tensor(values)[:, None]},
        "trained": torch.tensor([v > 2 for v in values]),
    }


def test_states_beyond_the_budget_go_to_files_and_come_back():
    states = ClientStates(torch.device("cpu"), everybody=False, budget=20)
    for client in range(6):
        states.scatter([(0, client)], state_of_lanes(float(client)))
    assert states.bytes <= 20
    assert len(states) == 6
    found = states.gather([(0, 5), (0, 0), (1, 0)], lambda lane: state_of_lanes(99.0))
    assert found["local"]["w"].flatten().tolist() == [5.0, 0.0, 99.0]
    assert found["trained"].tolist() == [True, False, True]
    assert found["base"] == {}


def test_a_state_replaces_the_one_before_wherever_that_was():
    states = ClientStates(torch.device("cpu"), everybody=False, budget=20)
    for value in range(5):
        states.scatter(
            [(0, 0), (0, 1), (0, 2)], state_of_lanes(float(value), 10.0 + value, 20.0 + value)
        )
        states.settle()
        assert len(list(states.folder.iterdir())) == 3 - len(states._resident), (
            "a file for each that is not in memory"
        )
    assert [states[0, client]["local"]["w"].item() for client in range(3)] == [4.0, 14.0, 24.0]
    assert states.bytes == sum(count_bytes(states[lane]) for lane in states._resident)


@pytest.mark.parametrize("everybody", [True, False])
@pytest.mark.parametrize("budget", [0, 10**9])
def test_a_round_can_be_undone(everybody, budget):
    states = ClientStates(torch.device("cpu"), everybody=everybody, budget=budget)
    states.scatter([(0, 0), (0, 1)], state_of_lanes(1.0, 2.0))
    states.settle()
    states.scatter([(0, 0)], state_of_lanes(5.0))
    states.scatter([(0, 1), (0, 2)], state_of_lanes(6.0, 7.0))
    states.undo()
    assert {lane: states[lane]["local"]["w"].item() for lane in states} == {
        (0, 0): 1.0,
        (0, 1): 2.0,
    }
    assert states.bytes == sum(states._resident.values())
    states.scatter([(0, 1)], state_of_lanes(8.0))
    states.settle()
    states.undo()  # nothing has happened since
    assert states.gather([(0, 0), (0, 1)], lambda lane: {})["local"]["w"].flatten().tolist() == [
        1.0,
        8.0,
    ]


@pytest.mark.parametrize("everybody", [True, False])
def test_files_are_never_changed_and_stay_while_somebody_refers_to_them(everybody, tmp_path):
    states = ClientStates(torch.device("cpu"), everybody=everybody, folder=tmp_path)
    states.scatter([(0, 0), (0, 1)], state_of_lanes(1.0, 2.0))
    states.settle()
    first = states.write()
    states.hold({file.name for file in first.values()})
    states.scatter([(0, 1)], state_of_lanes(3.0))
    states.settle()
    second = states.write()
    assert second[0, 0] == first[0, 0], "what has not changed is not written again"
    assert second[0, 1].name != first[0, 1].name
    for files, wanted in ((first, [1.0, 2.0]), (second, [1.0, 3.0])):
        other = ClientStates(torch.device("cpu"), everybody=everybody, folder=tmp_path)
        other.adopt(files)
        assert (
            other.gather([(0, 0), (0, 1)], lambda lane: {})["local"]["w"].flatten().tolist()
            == wanted
        )
    states.hold({file.name for file in second.values()})
    assert {path.name for path in tmp_path.iterdir()} == {file.name for file in second.values()}


@pytest.mark.parametrize("budget", [0, 10**9])
def test_a_run_does_not_depend_on_where_states_are(budget):
    sizes = [9, 5, 7, 12, 3, 8]
    options = {"rounds": 4, "join_ratio": 0.5}
    simulation, _, models = simulate(
        "ditto+ala", ragged_task(sizes), client_memory=budget, **options
    )
    _, _, reference = simulate("ditto+ala", ragged_task(sizes), **options)
    assert bool(list(simulation.clients.folder.iterdir())) == (budget == 0)
    for key in reference:
        assert_close(models[key], reference[key], 0)


def test_only_clients_that_took_part_have_a_state():
    simulation, _, _ = simulate("fedala", ragged_task([6] * 20), rounds=2, join_ratio=0.1)
    assert set(simulation.clients) == {
        (0, c) for round in (1, 2) for c in simulation.draw_participants(0, round)
    }
    assert all(
        leaf.device.type == "cpu"
        for lane in simulation.clients
        for _, leaf in leaves(simulation.clients[lane])
    )


@pytest.mark.skipif(os.name != "posix", reason="only here can a process be found to be alive")
def test_what_a_killed_process_has_left_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    names = (
        f"{platform.node()}-{dead.pid}-x",
        f"{platform.node()}-{os.getpid()}-y",
        f"elsewhere-{dead.pid}-z",
    )
    for name in names:
        (tmp_path / f"fedala-clients-{name}").mkdir()
        (tmp_path / f"fedala-clients-{name}" / "0-0-0.safetensors").touch()
    states = ClientStates(torch.device("cpu"), everybody=False, budget=0)
    assert states.folder.parent == tmp_path
    left = {path.name.removeprefix("fedala-clients-") for path in tmp_path.iterdir()} - {
        states.folder.name.removeprefix("fedala-clients-")
    }
    assert left == set(names[1:])


@pytest.mark.parametrize("everybody", [True, False])
def test_lanes_in_another_order_get_their_own_states(everybody):
    """A stack that holds the same lanes in another order is not returned as it is."""
    states = ClientStates(torch.device("cpu"), everybody=everybody)
    states.scatter([(0, 0), (0, 1), (0, 2)], state_of_lanes(1.0, 2.0, 3.0))
    for order in ([2, 0, 1], [1, 0, 2], [0, 2, 1], [0, 1, 2]):
        found = states.gather([(0, client) for client in order], lambda lane: {})
        assert found["local"]["w"].flatten().tolist() == [client + 1.0 for client in order]
        assert found["trained"].tolist() == [client == 2 for client in order]
