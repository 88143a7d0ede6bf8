"""Who does the clients' part of a round, and in which order, does not matter."""

import pytest
import torch
from small import Net, assert_close, evaluate, ragged_task, same_rows, start_of
from torch import nn

from fedala.errors import UserError
from fedala.lanes import Cohort, Message
from fedala.lanes.trees import count_lanes, take
from fedala.lanes.weight_learning import Settings
from fedala.methods import make
from fedala.methods.fedavg import FedAvg
from fedala.methods.with_ala import WithALA
from fedala.simulation import Simulation
from fedala.simulation.client_round import CohortResult, run_client_round, score_model
from fedala.simulation.client_states import ClientStates
from fedala.simulation.transport import Transport

SIZES = [5, 22, 13, 3, 0]
METHODS = ["fedavg", "fedala", "ditto+ala", "fedamp", "apple", "fedfomo", "fedrep", "local"]


class ReverseTransport(Transport):
    """Runs each client alone, the last one first."""

    def __init__(self, setup):
        self.setup = setup
        self.client_states = ClientStates(setup.task.device, everybody=False)

    def _cohorts(self, round, sent, joined):
        setup = self.setup
        for run in reversed(range(len(setup.seeds))):
            own = count_lanes(sent[run]) > 1
            for position, client in reversed(list(enumerate(joined[run]))):
                lane = position if own else 0
                received = take(sent[run], slice(lane, lane + 1))
                seeds = [setup.seeds[run]]
                yield (
                    [(run, client)],
                    Cohort(setup.task, [client], seeds, round, setup.rounds, received, [0]),
                )

    def run_round(self, request, sent, joined):
        setup = self.setup
        for lanes, cohort in self._cohorts(request.round, sent, joined):
            state = self.client_states.gather(
                lanes, lambda lane: setup.init_client(setup.task, lane)
            )
            yield run_client_round(setup.method, cohort, lanes, state, request, setup.parts)

    def score_models(self, round, models, clients, *, predicts=False):
        for lanes, cohort in self._cohorts(round, [Message(model) for model in models], clients):
            scores = score_model(cohort, cohort.received.model, self.setup.parts)
            yield CohortResult(lanes, scores=scores)

    def keep_states(self, result, policy):
        assert not result.diverged
        self.client_states.scatter(result.lanes, result.state)

    def state(self):
        return {}

    def restore(self, round, state):
        pass


RATIOS = [
    (name, ratio)
    for name in METHODS
    for ratio in (1.0, 0.5)
    if ratio == 1 or not make(name).requires_all_clients
]


@pytest.mark.parametrize(("name", "join_ratio"), RATIOS)
def test_every_transport_gives_the_same_rounds(name, join_ratio):
    options = {"seeds": (3, 4), "rounds": 2, "join_ratio": join_ratio}
    _, expected, expected_models = evaluate(name, ragged_task(SIZES), **options)
    for other in ({"lanes": 2, "threads": 3}, {"transport": ReverseTransport}):
        simulation, found, models = evaluate(name, ragged_task(SIZES), **options, **other)
        assert simulation.transport.threads == other.get("threads", 1)
        same_rows([one.row for one in found], [one.row for one in expected], 1e-10)
        for one, wanted in zip(found, expected, strict=True):
            assert one.client_scores == pytest.approx(wanted.client_scores, abs=1e-10)
        assert models.keys() == expected_models.keys()
        for key, model in models.items():
            assert_close(model, expected_models[key], 1e-10)


class Drifting(FedAvg):
    """FedAvg whose server sends the mean of the clients' last steps, which they take once more."""

    def extra_template(self, task, initial):
        return {"step": {name: initial[name] for name in task.trainable}}

    def init_server(self, task, initial, server_round):
        steps = {name: torch.zeros_like(initial[name]) for name in task.trainable}
        return {"global": initial, "step": steps}

    def send(self, server, server_round):
        return Message(server["global"], {"step": server["step"]})

    def initialize(self, cohort, received, state):
        steps = received.extra["step"]
        return received.model | {n: received.model[n] + 0.1 * s for n, s in steps.items()}, state

    def train(self, cohort, initialized, received, state):
        upload, state = super().train(cohort, initialized, received, state)
        steps = {name: upload.model[name] - initialized[name] for name in cohort.task.trainable}
        return upload._replace(extra={"step": steps}), state

    def aggregate(self, server, uploads, server_round):
        mean = uploads.average()
        return {"global": mean.model, "step": mean.extra["step"]}


@pytest.mark.parametrize("join_ratio", [1.0, 0.5])
@pytest.mark.parametrize("method", [Drifting(), WithALA(Drifting(), Settings())])
def test_extra_tensors_travel_both_ways_in_every_transport(method, join_ratio):
    options = {"seeds": (3, 4), "rounds": 3, "join_ratio": join_ratio}
    rows, servers = [], []
    for other in ({}, {"lanes": 2, "threads": 3}, {"transport": ReverseTransport}):
        task = ragged_task(SIZES)
        simulation = Simulation(method, task, start_of(task), **options, **other)
        rows.append([evaluation.row for evaluation in simulation.run()])
        servers.append(simulation.servers)
    size = sum(value.numel() for value in simulation.initial[0].values())
    extra = sum(value.numel() for value in servers[0][0]["step"].values())
    assert (rows[0][0].sent, rows[0][0].uploaded) == (size + extra, size + extra)
    assert servers[0][0]["step"]["out.weight"].abs().max() > 1e-3
    for found in rows[1:]:
        same_rows(found, rows[0], 1e-10)
    for found in servers[1:]:
        for one, wanted in zip(found, servers[0], strict=True):
            assert_close(one["global"], wanted["global"], 1e-10)
            assert_close(one["step"], wanted["step"], 1e-10)


class DropoutNet(Net):
    """A model that draws random numbers in training."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return super().forward(self.dropout(x))


def test_a_model_with_dropout_runs_in_one_thread_and_says_so():
    task, messages = ragged_task(SIZES, model=DropoutNet()), []
    simulation = Simulation(
        make("fedavg"), task, start_of(task, DropoutNet), threads=3, on_message=messages.append
    )
    assert simulation.transport.threads == 1
    assert messages == [
        "The model draws random numbers (dropout), so clients train one after another and not in "
        "3 threads."
    ]


def test_a_model_without_dropout_runs_in_threads_and_says_nothing():
    task, messages = ragged_task(SIZES), []
    simulation = Simulation(
        make("fedavg"), task, start_of(task), threads=3, on_message=messages.append
    )
    assert simulation.transport.threads == 3
    assert messages == []


# --- messages that are refused --------------------------------------------------------------------


def first_round(method):
    task = ragged_task(SIZES)
    Simulation(method, task, start_of(task)).step(1, train=True)


class Sends(FedAvg):
    """FedAvg that sends an extra tensor of some shape."""

    shape: tuple[int, ...]

    def send(self, server, server_round):
        return Message(server["global"], {"number": torch.zeros(self.shape)})


@pytest.mark.parametrize(("shape", "lanes"), [((5,), "1, 5"), ((3,), "1, 3"), ((), "0, 1")])
def test_a_message_of_different_numbers_of_lanes_is_refused(shape, lanes):
    method = type("Uneven", (Sends,), {"shape": shape})()
    with pytest.raises(UserError) as refusal:
        first_round(method)
    assert str(refusal.value) == (
        f"FedAvg sends tensors of [{lanes}] lanes to 5 clients. All tensors of a message must have "
        "one lane for all clients, or one for each."
    )


class Uploads(FedAvg):
    """FedAvg that uploads an extra tensor."""

    announced = 2
    shape: tuple[int, ...] = (5, 2)

    def extra_template(self, task, initial):
        return {"number": torch.zeros(1, self.announced)} if self.announced else {}

    def train(self, cohort, initialized, received, state):
        upload, state = super().train(cohort, initialized, received, state)
        return upload._replace(extra={"number": torch.zeros(self.shape)}), state


def test_an_announced_extra_tensor_is_taken():
    first_round(Uploads())


@pytest.mark.parametrize(("announced", "says"), [(0, "nothing"), (3, "a tensor of float32 (1, 3)")])
def test_extra_tensors_that_are_not_announced_are_refused(announced, says):
    method = type("Unannounced", (Uploads,), {"announced": announced})()
    with pytest.raises(UserError) as refusal:
        first_round(method)
    assert str(refusal.value) == (
        "FedAvg: train returns a tensor of float32 (1, 2) under 'extra/number', where "
        f"extra_template has {says}. Names, types and shapes must be the same."
    )


def test_an_announced_extra_tensor_that_is_missing_is_refused():
    class Silent(Uploads):
        def train(self, cohort, initialized, received, state):
            return FedAvg.train(self, cohort, initialized, received, state)

    says = "FedAvg: train returns nothing under 'extra/number', where extra_template has a tensor"
    with pytest.raises(UserError, match=says):
        first_round(Silent())


@pytest.mark.parametrize(("shape", "lanes"), [((1, 2), "1, 5"), ((10,), "5, 10"), ((), "0, 5")])
def test_an_upload_without_a_lane_for_each_client_is_refused(shape, lanes):
    method = type("Uneven", (Uploads,), {"shape": shape})()
    with pytest.raises(UserError) as refusal:
        first_round(method)
    assert str(refusal.value) == (
        f"FedAvg uploads tensors of [{lanes}] lanes for 5 clients. All tensors of an upload must "
        "have one lane for each client."
    )
