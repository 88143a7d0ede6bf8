"""What goes wrong in a round: clients that diverge, a device with too little memory."""

import pytest
import torch
from small import EACH_KIND, QUICK, assert_close, ragged_task, simulate, start_of

from fedala.errors import RunError
from fedala.lanes.backend import Backend
from fedala.lanes.cohort import Cohort
from fedala.lanes.task import Task
from fedala.methods import make
from fedala.simulation import Simulation

SIZES = [9, 5, 17, 12, 3]
BAD = 2


@pytest.fixture
def poisoned(monkeypatch):
    """The training of client 2 comes to nothing in round 2, from its second step on."""

    def poison(round=2, client=BAD, step=1, value=float("nan")):
        def watched(self, turns, state, *args, train=Cohort.train, **options):
            def broken(step_of):
                def taken(task, state, fixed, x, y):
                    losses = step_of(task, state, fixed, x, y)
                    whole = leaves_of(x)[0].shape[1] == (
                        options.get("batch_size") or task.batch_size
                    )
                    lanes = [whole and c == client and self.round == round for c in self.clients]
                    calls[0] += any(lanes)
                    if calls[0] > step:
                        for leaf in leaves_of(state):
                            for lane in range(len(leaf)):
                                if lanes[lane]:
                                    leaf[lane] = value
                    return losses

                return taken

            calls = [0]
            turns = broken(turns) if callable(turns) else [broken(turn) for turn in turns]
            return train(self, turns, state, *args, **options)

        monkeypatch.setattr(Cohort, "train", watched)

    return poison


def leaves_of(tree):
    from fedala.lanes.trees import leaves

    return [leaf for _, leaf in leaves(tree) if leaf.is_floating_point()]


def simulation_of(method, task, **options):
    return Simulation(make(method, QUICK.get(method)), task, start_of(task), rounds=3, **options)


#: Among others in its cohort, and alone; then the server's part is what differs.
ALONE = ("fedavg", "ditto", "fedrep", "fedamp", "fedfomo", "apple", "fedala", "ditto+ala")
ALONE += ("scaffold", "feddyn", "fedproto", "ifca", "fedpac", "feddbe")
DIVERGING = [*((method, None) for method in EACH_KIND), *((method, 1) for method in ALONE)]


@pytest.mark.parametrize(("method", "lanes"), DIVERGING)
def test_a_client_that_diverges_harms_nobody_and_keeps_its_last_good_model(method, lanes, poisoned):
    """After round 2, the others are as in a good run, and the bad client as after round 1."""
    calm = simulation_of(method, ragged_task(SIZES), lanes=lanes)
    for round in (1, 2):
        [evaluation] = calm.step(round, train=True)
        assert evaluation.row.diverged == 0
        if round == 1:
            before = dict(calm.clients[0, BAD])
    poisoned()
    faults = []
    shaken = simulation_of(method, ragged_task(SIZES), lanes=lanes, on_fault=faults.append)
    shaken.step(1, train=True)
    [evaluation] = shaken.step(2, train=True)
    assert evaluation.row.diverged == 1
    [fault] = faults
    assert (fault.client, fault.round, fault.step) == (BAD, 1, 2)
    assert str(fault).endswith("diverged in round 2, first in step 2")
    for client in range(len(SIZES)):
        found = dict(shaken.clients[0, client])
        wanted = before if client == BAD else dict(calm.clients[0, client])
        assert all(map(torch.equal, leaves_of(found), leaves_of(wanted))), f"client {client}"
    assert all(leaf.isfinite().all() for leaf in leaves_of(shaken.servers))
    [evaluation] = shaken.step(3, train=True)
    assert evaluation.row.diverged == 0


def test_the_aggregate_is_that_of_the_others(poisoned):
    task = ragged_task(SIZES)
    poisoned(round=1)
    shaken = simulation_of("fedavg", task)
    shaken.step(1, train=True)
    trained = []
    for client in [c for c in range(len(SIZES)) if c != BAD]:
        alone = Cohort(task, [client], [0], round=1)
        trained.append((len(task.parts["train"][client]), alone.fit(start_of(task)(0))))
    total = sum(size for size, _ in trained)
    by_hand = {
        name: sum(size / total * model[name] for size, model in trained)
        if value.is_floating_point()
        else value
        for name, value in trained[0][1].items()
    }
    assert_close(shaken.servers[0]["global"], by_hand, 1e-12)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinite_models_are_seen(value, poisoned):
    poisoned(value=value)
    _, rows, _ = simulate("fedala", ragged_task(SIZES), rounds=3)
    assert [row.diverged for row in rows] == [0, 1, 0, 0]


def test_an_infinite_loss_is_seen_even_if_the_model_is_finite():
    def loss(output, y):
        return torch.nn.functional.cross_entropy(output, y) + (torch.inf if len(y) == 3 else 0)

    _, rows, _ = simulate("fedavg", ragged_task([8, 4, 3], loss=loss), rounds=1)
    assert rows[0].diverged == 1


def test_reset_starts_the_client_over(poisoned):
    poisoned()
    simulation = simulation_of("ditto", ragged_task(SIZES), on_divergence="reset")
    simulation.step(1, train=True)
    simulation.step(2, train=True)
    assert_close(simulation.clients[0, BAD]["local"], simulation.initial[0], 0)


def test_stop_stops_and_names_the_client(poisoned):
    poisoned()
    simulation = simulation_of("ditto", ragged_task(SIZES), on_divergence="stop")
    simulation.step(1, train=True)
    before = dict(simulation.servers[0]["global"])
    with pytest.raises(
        RunError, match=rf"^Client {BAD} \(seed 0, lane \d\) diverged in round 2, first in step 2"
    ):
        simulation.step(2, train=True)
    assert simulation.servers[0]["global"] == before


def test_a_round_that_is_stopped_leaves_every_client_as_it_was(poisoned):
    """Three clients have trained in round 2 before the bad one, alone, stops the run."""
    poisoned(client=1, step=0)
    simulation = simulation_of("ditto", ragged_task(SIZES), on_divergence="stop", lanes=1)
    simulation.step(1, train=True)
    before = {lane: dict(state) for lane, state in simulation.clients.items()}
    with pytest.raises(RunError, match=r"^Client 1 .* diverged in round 2"):
        simulation.step(2, train=True)
    assert simulation.round == 1
    for lane, state in before.items():
        assert all(map(torch.equal, leaves_of(simulation.clients[lane]), leaves_of(state))), lane


def test_if_everybody_diverges_the_global_model_stays():
    task = ragged_task([9, 17, 12], lr=1e38, dtype=torch.float32)
    simulation, rows, _ = simulate("fedavg", task, rounds=2)
    assert [row.diverged for row in rows] == [3, 3, 0]
    assert_close(simulation.servers[0]["global"], simulation.initial[0], 0)


def test_rounds_without_evaluation_count_too(poisoned):
    poisoned()
    _, rows, _ = simulate("fedala", ragged_task(SIZES), rounds=3, eval_every=3)
    assert [(row.round, row.diverged) for row in rows] == [(0, 0), (3, 1)]


def test_a_client_that_diverged_is_scored_with_the_model_it_keeps(poisoned):
    """With ρ < 1, absent clients are evaluated with the model of their last good round."""
    task = ragged_task([9] * 6)
    simulation = Simulation(make("local"), task, start_of(task), rounds=3, join_ratio=0.5)
    joined = simulation.draw_participants(0, 1)
    poisoned(round=1, client=joined[0])
    simulation.step(1, train=True)
    score = Cohort(task, [joined[0]], [0]).evaluate(simulation.initial[0])
    assert simulation.absent_scores[0, joined[0], 0].tolist() == [
        score.score.item(),
        score.loss.item(),
        3,
    ]


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "room"),
    [("fedala", 2), ("fedala", 1), ("fedfomo", 1), ("ditto+ala", 1), ("fedamp", 1)],
)
def test_too_many_lanes_are_halved_and_the_round_is_retried(method, room, monkeypatch):
    def crowded(self, *args, train=Cohort.train, **options):
        if len(self) > room and self.round == 2:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …"
            )
        return train(self, *args, **options)

    _, wanted, models = simulate(method, ragged_task(SIZES), rounds=3)
    monkeypatch.setattr(Cohort, "train", crowded)
    messages = []
    task = ragged_task(SIZES)
    simulation = Simulation(
        make(method), task, start_of(task), rounds=3, on_message=messages.append
    )
    found = {}
    evaluations = list(
        simulation.run(
            lambda personal: found.update({(personal.seed, personal.client): personal.model})
        )
    )
    assert simulation.transport.lanes == room
    assert messages[0] == "Out of GPU memory with 5 lanes; retrying with 2."
    for one, other in zip(evaluations, wanted, strict=True):
        assert one.row.loss == pytest.approx(other.loss, rel=1e-9)
    for key, model in models.items():
        assert_close(found[key], model, 1e-9)


def test_a_retried_round_frees_what_the_larger_cohorts_have_cached(monkeypatch):
    def crowded(self, *args, train=Cohort.train, **options):
        if len(self) > 2 and self.round == 2:
            task.predrawn["a draw", 3] = torch.ones(5)
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …"
            )
        return train(self, *args, **options)

    freed = []
    monkeypatch.setattr(Backend, "free_caches", lambda self: freed.append(self.device))
    monkeypatch.setattr(Cohort, "train", crowded)
    task = ragged_task(SIZES)
    simulation = Simulation(make("fedala"), task, start_of(task), rounds=2)
    simulation.step(1, train=True)
    assert {len(clients) for _, clients in task.evaluation_samples} == {5}
    simulation.step(2, train=True)
    assert {len(clients) for _, clients in task.evaluation_samples} == {1, 2}
    assert not task.predrawn
    assert freed == [task.device]


def test_a_client_that_does_not_fit_alone_ends_the_run(monkeypatch):
    def crowded(self, *args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")

    monkeypatch.setattr(Cohort, "train", crowded)
    task: Task = ragged_task(SIZES)
    simulation = Simulation(make("fedavg"), task, start_of(task))
    with pytest.raises(
        RunError, match=r"^Out of GPU memory with a single client: CUDA out of memory\.$"
    ):
        simulation.step(1, train=True)
    assert simulation.round == 0


def test_a_retried_round_reports_each_fault_once_and_at_its_end(poisoned, monkeypatch):
    """The bad client is in the first cohort of round 2, and the second one runs out of memory."""
    poisoned()

    def crowded(self, *args, train=Cohort.train, **options):
        if len(self) > 1 and BAD not in self.clients and self.round == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return train(self, *args, **options)

    monkeypatch.setattr(Cohort, "train", crowded)
    faults, messages = [], []
    simulation = simulation_of(
        "ditto",
        ragged_task(SIZES),
        lanes=2,
        on_fault=lambda fault: faults.append((simulation.round, fault)),
        on_message=messages.append,
    )
    simulation.step(1, train=True)
    [evaluation] = simulation.step(2, train=True)
    assert messages == ["Out of GPU memory with 2 lanes; retrying with 1."]
    once = simulation_of("ditto", ragged_task(SIZES), lanes=1)
    for round in (1, 2):
        once.step(round, train=True)
    for client in range(len(SIZES)):
        assert_close(simulation.clients[0, client]["local"], once.clients[0, client]["local"], 1e-9)
    [(round, fault)] = faults
    assert round == 2, "the round should be over when its faults are reported"
    assert (fault.client, fault.round, fault.step) == (BAD, 1, 2)
    assert evaluation.row.diverged == 1


@pytest.mark.parametrize("policy", ["skip", "reset"])
@pytest.mark.parametrize("lanes", [1, None])
def test_a_client_of_apple_that_diverges_in_the_first_round_keeps_a_whole_state(
    policy, lanes, poisoned
):
    """APPLE's p_i exists once the server has sent p_0: the state before round 1 has none."""
    calm = simulation_of("apple", ragged_task(SIZES), lanes=lanes)
    calm.step(1, train=True)
    poisoned(round=1)
    shaken = simulation_of("apple", ragged_task(SIZES), lanes=lanes, on_divergence=policy)
    [evaluation] = shaken.step(1, train=True)
    assert evaluation.row.diverged == 1
    for client in range(len(SIZES)):
        found, wanted = dict(shaken.clients[0, client]), dict(calm.clients[0, client])
        assert set(found) == {"core", "p"}
        if client == BAD:
            wanted = {"core": shaken.initial[0], "p": shaken.servers[0]["p_0"]}
        assert_close(found["core"], wanted["core"], 0)
        assert torch.equal(found["p"], wanted["p"])
    [evaluation] = shaken.step(2, train=True)
    assert evaluation.row.diverged == 0
