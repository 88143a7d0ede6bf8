"""What a round over ranks must hold besides its result: faults, details, newcomers, kept models."""

import pickle

import numpy as np
import pytest
import small
import torch
from ranks import threads
from ranks.test_equivalence import SIZES, assert_same, task
from ranks.threads import evaluate_on_ranks
from small import assert_close, evaluate, ragged_task, start_of

from fedala.errors import RunError, UserError
from fedala.lanes import Message, Uploads
from fedala.methods import Method, make
from fedala.ranks import worker
from fedala.ranks.assignment import assign_lanes
from fedala.ranks.delivery import deliver
from fedala.ranks.group import RankLost, describe_tree, dump, pack, unpack
from fedala.records import MODEL_KINDS
from fedala.simulation import Simulation
from fedala.simulation.local_transport import LocalTransport

OPTIONS = {"rounds": 3, "join_ratio": 0.5}


def test_lanes_are_balanced_by_their_load_and_stay_where_their_state_is():
    lanes = [(0, client) for client in range(6)]
    load = dict(zip(lanes, [7, 1, 5, 3, 4, 4], strict=True))
    shares = assign_lanes(lanes, 2, load.__getitem__, {})
    # By hand: 7 to the first, 5 and 4 to the second, 4 to the first, 3 to the second, 1 to any.
    assert shares == [[(0, 0), (0, 1), (0, 5)], [(0, 2), (0, 3), (0, 4)]]
    owners = {(0, 0): 1, (0, 2): 1}
    assert assign_lanes(lanes, 2, load.__getitem__, owners) == [
        [(0, 1), (0, 3), (0, 4), (0, 5)],
        [(0, 0), (0, 2)],
    ]


def test_a_tree_of_any_types_travels_as_bytes():
    tree = {
        "a": torch.arange(3, dtype=torch.float64).expand(2, 3),
        "flags": torch.tensor([[True], [False]]),
        "odd": (torch.ones(1, 5, dtype=torch.bfloat16), torch.tensor([[7]])),
        "empty": torch.zeros(0, 4),
    }
    cpu = torch.device("cpu")
    found = unpack(pack(tree, cpu), describe_tree(tree), cpu)
    assert describe_tree(found) == describe_tree(tree)
    assert torch.equal(found["a"], tree["a"])
    assert torch.equal(found["flags"], tree["flags"])
    assert torch.equal(found["odd"][0], tree["odd"][0])
    assert torch.equal(found["odd"][1], tree["odd"][1])


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).view(3, 4)[:, 1:3],  # a view: the rest of its memory stays where it is
        torch.tensor(7),
        torch.ones(2, dtype=torch.bfloat16).expand(3, 2),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
    ],
    ids=["view", "number", "expanded", "empty", "flags"],
)
def test_tensors_in_objects_travel_as_their_bytes(value):
    data = dump({"a": [value]})
    [found] = pickle.loads(data)["a"]
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert torch.equal(found, value)
    assert len(data) < 400


@pytest.mark.parametrize("name", ["fedala", "fedavg", "fedrep+ala"])
def test_details_of_all_kinds_of_models(name):
    options = {**OPTIONS, "evaluate": MODEL_KINDS, "metrics_every": 2, "record_weights": 1}
    ranks, one = evaluate_on_ranks(2, name, task, **options), evaluate(name, task(), **options)
    assert_same(ranks, one)
    for a, b in zip(ranks[1], one[1], strict=True):
        assert [m.model for m in a.models] == [m.model for m in b.models]
        for mine, other in zip(a.models, b.models, strict=True):
            assert mine.figures == pytest.approx(other.figures, abs=1e-9)
        assert [(w.client, w.parameter) for w in a.weights] == [
            (w.client, w.parameter) for w in b.weights
        ]
        means = [w.mean for w in b.weights]
        assert [w.mean for w in a.weights] == pytest.approx(means, abs=1e-9)


@pytest.mark.parametrize("name", ["fedala", "fedavg", "apple"])
def test_newcomers(name):
    options = {"rounds": 2, "held_out": 2, "holdout_epochs": (0, 2)}
    ranks, one = evaluate_on_ranks(3, name, task, **options), evaluate(name, task(), **options)
    for a, b in zip(ranks[1], one[1], strict=True):
        assert [n.epochs for n in a.newcomers] == [0, 2]
        for mine, other in zip(a.newcomers, b.newcomers, strict=True):
            assert np.allclose(mine.scores, other.scores, atol=1e-9)


def bad_task():
    """Client 1 diverges in its first step."""
    made = ragged_task(SIZES)
    made.x[made.parts["train"][1][0]] = float("nan")
    return made


@pytest.mark.parametrize("policy", ["skip", "reset"])
def test_a_client_that_diverges_on_another_rank(policy):
    found: list[list[tuple[int, int, int | None]]] = []
    results = []
    for run in (lambda **o: evaluate_on_ranks(2, "fedala", bad_task, **o), None):
        faults = []
        options = {
            "rounds": 2,
            "on_divergence": policy,
            "on_fault": lambda f, to=faults: to.append((f.client, f.round, f.step)),
        }
        results.append(run(**options) if run else evaluate("fedala", bad_task(), **options))
        found.append(faults)
    assert_same(*results)
    assert found[0] == found[1]
    assert [(client, round) for client, round, _ in found[0]] == [(1, 0), (1, 1)]


def test_a_client_that_diverges_can_stop_the_run():
    with pytest.raises(RunError, match="on_divergence is stop"):
        evaluate_on_ranks(2, "fedala", bad_task, rounds=2, on_divergence="stop")


def test_a_rank_without_memory_makes_all_ranks_halve_their_lanes(monkeypatch):
    run_round, failures = LocalTransport.run_round, []

    def fail_once(self, request, sent, joined):
        if request.round == 2 and [3] in [list(own)[:1] for own in joined] and not failures:
            failures.append(joined)
            raise torch.OutOfMemoryError("out of memory. Tried to allocate")
        return run_round(self, request, sent, joined)

    monkeypatch.setattr(LocalTransport, "run_round", fail_once)
    said: list[str] = []
    options = {"rounds": 3, "on_message": said.append}
    first = {}

    def look(simulation):
        first["transport"] = simulation.transport

    sizes = [1, 2, 2, 9, 3]

    def make_task():
        return ragged_task(sizes)

    # The longest client, 3, begins the share of rank 0: let it be the one of rank 1.
    monkeypatch.setattr(
        "fedala.ranks.transport.assign_lanes",
        lambda lanes, ranks, load, owners: [
            [lane for lane in lanes if lane[1] < 3],
            [lane for lane in lanes if lane[1] >= 3],
        ],
    )
    ranks = evaluate_on_ranks(2, "fedala", make_task, prepare=look, **options)
    assert failures
    assert said == ["Out of GPU memory with 3 lanes; retrying with 1."]
    assert first["transport"].lanes == 1
    monkeypatch.undo()
    assert_same(ranks, evaluate("fedala", make_task(), rounds=3))


def test_an_error_on_another_rank_is_raised_by_rank_0(monkeypatch, capfd):
    run_round = LocalTransport.run_round

    def fail(self, request, sent, joined):
        if 3 in joined[0]:
            raise KeyError("a mistake in somebody's method")
        return run_round(self, request, sent, joined)

    monkeypatch.setattr(LocalTransport, "run_round", fail)
    with pytest.raises(RunError, match=r"KeyError: .*somebody's method"):
        evaluate_on_ranks(3, "fedavg", lambda: ragged_task([9, 8, 7, 1]), rounds=1)

    def refuse(self, request, sent, joined):
        raise UserError("This cannot be.")

    monkeypatch.setattr(LocalTransport, "run_round", refuse)
    with pytest.raises(UserError, match="This cannot be"):
        evaluate_on_ranks(2, "fedavg", task, rounds=1)
    assert "Traceback" in capfd.readouterr().err  # of the unexpected one


def test_an_error_that_nobody_expects_is_rank_0s_own_if_it_has_one(monkeypatch, capfd):
    """As in one process; that of another rank is printed once, with the place in the code."""

    def fail(self, request, sent, joined):
        raise KeyError("a mistake in somebody's method")

    monkeypatch.setattr(LocalTransport, "run_round", fail)
    with pytest.raises(KeyError, match="somebody's method") as caught:
        evaluate_on_ranks(3, "fedavg", task, rounds=1)
    assert caught.traceback[-1].name == "fail"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_cannot_take_its_tensors_leaves_the_run(monkeypatch, who):
    """The others would wait for it in vain."""

    def fail(group, *arguments):
        if group.rank == who:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate")
        return deliver(group, *arguments)

    monkeypatch.setattr(worker, "deliver", fail)
    with pytest.raises(RankLost) as caught:
        evaluate_on_ranks(2, "fedavg", task, rounds=1)
    assert ("Rank 0 cannot continue: OutOfMemoryError" in str(caught.value)) == (who == 0)


def test_models_of_a_round_that_is_undone_are_freed(monkeypatch):
    """Rank 0 does not know of them: a reply with an error has no reports."""
    workers, failures = [], []
    init, run_round = worker.Worker.__init__, LocalTransport.run_round

    def note(self, *arguments):
        init(self, *arguments)
        workers.append(self)

    def fail_late(self, request, sent, joined):
        for number, result in enumerate(run_round(self, request, sent, joined)):
            if request.round == 2 and number == 1 and not failures:
                failures.append(joined)
                raise torch.OutOfMemoryError("out of memory. Tried to allocate")
            yield result

    monkeypatch.setattr(worker.Worker, "__init__", note)
    monkeypatch.setattr(LocalTransport, "run_round", fail_late)

    def prepare(simulation):
        run = simulation.run

        def run_and_free(*arguments):
            yield from run(*arguments)
            simulation._evaluated = None
            simulation.transport.set_width(None, 1)  # any command takes the news along

        simulation.run = run_and_free

    evaluate_on_ranks(2, "fedala", task, lanes=2, prepare=prepare, rounds=3)
    assert failures
    assert len(workers) == 2
    assert [len(one._models) for one in workers] == [0, 0]


def keep_all(kept):
    """Keep the models of every evaluation, as the best ones are kept."""

    def prepare(simulation):
        simulation.keeps_evaluated = True
        step = simulation.step

        def follow(round, *, train):
            evaluations = step(round, train=train)
            for one in evaluations:
                kept.append((one.run, round, simulation.list_models(one.run)))
            return evaluations

        simulation.step = follow

    return prepare


@pytest.mark.parametrize("name", ["fedala", "fedavg", "ditto"])
def test_models_of_earlier_evaluations_stay_with_their_ranks(name):
    """They are asked for when the run is over, and then freed."""
    here, there = [], []
    options = {**OPTIONS, "seeds": (0, 1)}
    freed = {}

    def prepare(simulation):
        keep_all(there)(simulation)
        run = simulation.run

        def run_and_read(*arguments):
            yield from run(*arguments)
            for number, (at, round, models) in enumerate(there):
                there[number] = at, round, list(models)
            del models
            simulation._evaluated = None
            simulation.transport.set_width(None, 1)  # any command takes the news along
            freed["left"] = len(simulation.transport.worker._models)

        simulation.run = run_and_read

    evaluate_on_ranks(2, name, task, prepare=prepare, **options)
    simulation_options = {**options}
    simulation = _simulate_here(name, here, simulation_options)
    assert len(there) == len(here) == 8
    for (run, round, models), (other_run, other_round, expected) in zip(there, here, strict=True):
        assert (run, round) == (other_run, other_round)
        mine = {one.client: one for one in models}
        others = {one.client: one for one in expected}
        assert mine.keys() == others.keys()
        for client, one in mine.items():
            assert one.is_initial == others[client].is_initial
            assert_close(one.model, others[client].model, 1e-10)
    assert freed["left"] == 0
    assert simulation.round == 3


def _simulate_here(name, kept, options):
    made = task()
    simulation = Simulation(make(name), made, start_of(made), **options)
    keep_all(kept)(simulation)
    for number, _ in enumerate(simulation.run()):
        for position in range(len(kept)):
            run, round, models = kept[position]
            kept[position] = run, round, list(models)
        assert number < 8
    return simulation


class Median(Method):
    """Iterates over the uploads, and takes shares of its own."""

    name = "median"
    title = "Median"
    summary = "for this test"
    has_personal_models = False

    def aggregate(self, server, uploads, server_round):
        assert isinstance(uploads, Uploads)
        each = [message for _, message in uploads]
        assert [client for client, _ in uploads] == list(uploads.clients)
        names = each[0].model
        middle = {n: torch.cat([m.model[n] for m in each]).median(0, True)[0] for n in names}
        weighted = uploads.average(torch.ones(len(uploads), dtype=torch.float64)).model
        assert isinstance(each[0], Message)
        halves = {n: (middle[n] + weighted[n]) / 2 for n in names}
        return {"global": {n: h.to(names[n].dtype) for n, h in halves.items()}}


def test_a_method_that_looks_at_every_upload(monkeypatch):
    for module in (small, threads):
        monkeypatch.setattr(module, "make", lambda name, settings=None: Median())
    assert_same(
        evaluate_on_ranks(3, "median", task, rounds=3), evaluate("median", task(), rounds=3)
    )
