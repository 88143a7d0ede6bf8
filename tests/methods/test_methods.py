"""What every method must hold, and what sets each apart."""

from dataclasses import replace

import numpy as np
import pytest
import small
import torch
from small import (
    EACH_KIND,
    QUICK,
    Net,
    assert_close,
    evaluate,
    ragged_task,
    same_rows,
    simulate,
    start_of,
)

from fedala import methods
from fedala.errors import UserError
from fedala.lanes.cohort import Cohort
from fedala.lanes.trees import leaves
from fedala.methods import catalogue, list_methods, make
from fedala.methods.base import KINDS
from fedala.simulation import Simulation

SIZES = [5, 14, 9, 3, 8, 0]
EVERY = list_methods()


#: Each method with the shares of clients per round that it takes.
RATIOS = [
    (name, ratio)
    for name in EVERY
    for ratio in (1.0, 0.5)
    if ratio == 1 or not make(name).requires_all_clients
]
#: Who joins is one thing and ALA is another: two methods have both.
LANES = [
    (name, ratio)
    for name, ratio in RATIOS
    if ratio == 1 or "+ala" not in name or name in ("ditto+ala", "fedrep+ala")
]


def same_evaluations(a, b, tolerance):
    same_rows([one.row for one in a], [other.row for other in b], tolerance)
    for one, other in zip(a, b, strict=True):
        assert np.allclose(one.client_scores, other.client_scores, atol=tolerance)


def assert_lanes_are_independent(name, join_ratio):
    """A seed alone, client after client; two seeds, three at a time or all together: the same."""
    task = ragged_task(SIZES)
    options = {"rounds": 3, "join_ratio": join_ratio}
    _, alone, alone_models = evaluate(name, task, lanes=1, seeds=(4,), **options)
    _, threes, models = evaluate(name, task, lanes=3, seeds=(3, 4), **options)
    _, together, together_models = evaluate(name, task, lanes=None, seeds=(3, 4), **options)
    assert all(np.isfinite(one.row.loss) for one in threes)
    same_evaluations(threes, together, 1e-9)
    same_evaluations(alone, [one for one in threes if one.row.seed == 4], 1e-9)
    assert models.keys() == together_models.keys()
    assert alone_models.keys() == {key for key in models if key[0] == 4}
    assert alone_models
    for key in models:
        assert_close(models[key], together_models[key], 1e-10)
    for key in alone_models:
        assert_close(alone_models[key], models[key], 1e-10)


@pytest.mark.parametrize(("name", "join_ratio"), LANES)
def test_lanes_are_independent_over_rounds(name, join_ratio):
    assert_lanes_are_independent(name, join_ratio)


class Scaled(Net):
    """A model with a parameter that is a single number, as in CLIP."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return super().forward(x) * self.scale


def refuses_scaled(name):
    """Some cut off the last layer, and others replace it: here, that is the single number."""
    return name.startswith(("fedphp", "moon", "fedpac")) or make(name).head is not None


@pytest.mark.parametrize("name", [name for name in EACH_KIND if not refuses_scaled(name)])
def test_a_parameter_may_be_a_single_number(name, monkeypatch):
    task = ragged_task([5, 9, 3], model=Scaled())
    monkeypatch.setattr(small, "start_of", lambda task: start_of(task, Scaled))
    one, other = (simulate(name, task, rounds=2, lanes=lanes) for lanes in (1, None))
    same_rows(one[1], other[1], 1e-10)
    assert any((model["scale"] != 1.5).all() for model in one[2].values()), (
        "the number is never trained"
    )


@pytest.mark.parametrize("name", ["moon", "fedproto", "feddbe", "fedcp", "gpfl", "fedpac"])
def test_methods_that_work_with_features_refuse_a_model_of_one_layer(name):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
    task = ragged_task([5, 3], model=model)
    with pytest.raises(UserError, match=f"{make(name).title} needs a model of at least (2|two)"):
        Simulation(make(name), task, start_of(task, lambda: model))


@pytest.mark.parametrize("name", EACH_KIND)
def test_clients_in_threads_are_clients_one_after_another(name):
    one, other = (
        simulate(name, ragged_task(SIZES), rounds=2, lanes=1, threads=threads) for threads in (1, 3)
    )
    assert other[0].transport.threads == 3
    same_rows(one[1], other[1], 1e-12)
    for key in one[2]:
        assert_close(one[2][key], other[2][key], 1e-12)


#: What goes to each client and what comes back, where it is not one model each way.
COMMUNICATION = {
    "local": lambda model: (0, 0),
    "fedfomo": lambda model: (
        (len(SIZES) - 1) * model,
        model,
    ),  # the model of the client without samples is not sent
    "ifca": lambda model: (2 * model, model + 1),  # k models; the number of the cluster
    # Three centroids of six features, and which are known; h, means, variance and class counts.
    "fedpac": lambda model: (model + 18 + 3, model + 18 + 18 + 1 + 3),
    "apple": lambda model: (len(SIZES) * model + len(SIZES), model),  # M models, and p_0
    # A control variate for all that learns, which is all but the buffers.
    "scaffold": lambda model: (2 * model - sum(b.numel() for b in Net().buffers()),) * 2,
    "fedproto": lambda model: (21, 21),  # 3 prototypes of 6 features, and a number for each
    "feddbe": lambda model: (model + 7, model + 6),  # the mean of 6 features, and if it is known
}


#: The modules whose tensors stay with the client, if some do.
STAYS = {
    "fedrep": ("out.",),
    "fedper": ("out.",),
    "lg-fedavg": ("conv.", "norm.", "hidden."),
    "fedbn": ("norm.",),
    "fedbabu": ("out.",),
    "fedrod": ("out.personal.",),
    "feddbe": ("out.memory",),
    "fedcp": ("out.personal.", "out.context"),
    "gpfl": ("out.weight", "out.bias", "out.condition"),
}


def assert_what_is_sent_is_counted(name, simulation, row):
    start, base = simulation.initial[0], name.partition("+")[0]
    stays = STAYS.get(base, ())
    travels = sum(value.numel() for own, value in start.items() if not own.startswith(stays))
    sent, uploaded = COMMUNICATION.get(base, lambda model: (model, model))(travels)
    assert (row.sent, row.uploaded) == (sent, uploaded)


@pytest.mark.parametrize("name", EVERY)
def test_the_same_seed_gives_the_same_history_and_another_does_not(name):
    task = ragged_task(SIZES, dtype=torch.float32)
    first, again, other = (simulate(name, task, rounds=2, seeds=(seed,)) for seed in (0, 0, 1))
    same_rows(first[1], again[1], 0)
    for key in first[2]:
        assert_close(first[2][key], again[2][key], 0)
    assert [row.loss for row in first[1]] != [row.loss for row in other[1]]
    assert_what_is_sent_is_counted(name, first[0], first[1][1])


@pytest.mark.parametrize("name", EACH_KIND)
def test_it_continues_from_its_declared_state_alone(name):
    """A simulation that gets servers, clients and scores of another one ends as that one does."""
    task, join_ratio = ragged_task(SIZES), dict(RATIOS)[name]
    whole, _, _ = simulate(name, task, rounds=4, join_ratio=join_ratio)
    first, half = (
        Simulation(
            make(name, QUICK.get(name)), task, start_of(task), rounds=4, join_ratio=join_ratio
        )
        for _ in range(2)
    )
    for round in (1, 2):
        half.step(round, train=True)
    first.servers, first.absent_scores = half.servers, half.absent_scores
    first.transport.client_states = half.clients
    rows = [
        evaluation.row for round in (3, 4, 5) for evaluation in first.step(round, train=round < 5)
    ]
    for (_, a), (_, b) in zip(leaves(whole.servers), leaves(first.servers), strict=True):
        assert torch.equal(a, b)
    assert [row.round for row in rows] == [2, 3, 4]


@pytest.mark.parametrize("name", EVERY)
def test_a_client_without_training_samples_keeps_what_it_received_and_has_no_weight(name):
    empty = SIZES.index(0)
    _, rows, models = simulate(name, ragged_task(SIZES), rounds=3)
    assert all(np.isfinite(row.loss) for row in rows)
    if name == "fedala":
        assert_close(models[0, empty], models[0, None], 0)
    task = ragged_task(SIZES)
    task.parts = {
        part: [r for i, r in enumerate(rows) if i != empty] for part, rows in task.parts.items()
    }
    _, _, without = simulate(name, task, rounds=3)
    # Draws are keyed by client. The empty one is the last, so the others keep their keys.
    for key in without:
        assert_close(models[key], without[key], 1e-10)


def test_t_rounds_give_t_plus_one_evaluations():
    _, rows, _ = simulate("fedavg", ragged_task(SIZES), rounds=3)
    assert [row.round for row in rows] == [0, 1, 2, 3]
    _, rows, _ = simulate("fedavg", ragged_task(SIZES), rounds=3, eval_every=2)
    assert [row.round for row in rows] == [0, 2, 3]


# --- what sets each apart -------------------------------------------------------------------------


def final(name, settings=None, **options):
    simulation, rows, models = simulate(
        name, ragged_task(SIZES, **options.pop("task", {})), settings=settings, rounds=3, **options
    )
    return simulation, rows, models


def test_fedprox_without_its_term_is_fedavg_and_with_it_is_not():
    fedavg, plain, pulled = (
        final("fedavg"),
        final("fedprox", {"fedprox.mu": 0.0}),
        final("fedprox", {"fedprox.mu": 1.0}),
    )
    assert_close(fedavg[2][0, None], plain[2][0, None], 0)
    assert (fedavg[2][0, None]["out.weight"] - pulled[2][0, None]["out.weight"]).abs().max() > 1e-3


def test_a_strong_proximal_term_holds_the_model_at_the_anchor():
    """With lr·μ = 1, a step ends at anchor − lr·∇L, whatever the model was: by hand."""
    from fedala.lanes.trees import join

    task = ragged_task([12], lr=0.1)
    start, anchor = (join([start_of(task)(seed)]) for seed in (1, 2))
    cohort = Cohort(task, [0], [0])
    trained = cohort.fit(start, proximal=(10.0, anchor))
    by_hand = {name: value.clone() for name, value in start.items()}
    order = cohort.shuffle(0, task.parts["train"][0], "batches", 0)
    for rows in order[:4], order[4:8], order[8:]:
        with task.use_mode(training=True):
            _, gradients = task.gradients(by_hand, task.x[rows][None], task.y[rows][None])
        by_hand |= {name: anchor[name] - 0.1 * gradient for name, gradient in gradients.items()}
    assert_close(trained, by_hand, 1e-12)


def test_dittos_global_track_is_fedavgs_to_the_bit():
    assert_close(final("ditto")[2][0, None], final("fedavg")[2][0, None], 0)


def test_dittos_two_models_see_their_batches_in_different_orders(monkeypatch):
    """Otherwise w's epoch would repeat the order of v's first. Without shuffling, all are equal."""
    for shuffle in (True, False):
        orders, order_samples = [], Cohort._order_samples

        def see(self, *options, orders=orders, order_samples=order_samples):
            order = order_samples(self, *options)
            orders.append(tuple(order[0].tolist()))
            return order

        with monkeypatch.context() as patch:
            patch.setattr(Cohort, "_order_samples", see)
            simulate("ditto", ragged_task([22], shuffle=shuffle), rounds=1)
        assert len(orders) == 3  # two epochs of v, and one of w
        assert len(set(orders)) == (3 if shuffle else 1)


def test_ditto_without_its_term_is_local_with_two_epochs():
    # Without shuffling: v and Local's w have draws of their own.
    ditto = final("ditto", {"ditto.lam": 0.0}, task={"shuffle": False})
    local = final("local", task={"epochs": 2, "shuffle": False})
    for client in range(len(SIZES)):
        assert_close(ditto[2][0, client], local[2][0, client], 0)


def test_local_clients_never_meet():
    simulation, _, models = final("local")
    assert (0, None) not in models
    assert simulation.servers[0]["global"] == {}


def test_fedala_without_layers_is_fedavg():
    fedala, fedavg = final("fedala", {"fedala.layers": 0}), final("fedavg")
    assert_close(fedala[2][0, None], fedavg[2][0, None], 0)
    assert_close(fedala[2][0, 1], fedavg[2][0, None], 0)


def without_ala(row):
    metrics = {name: value for name, value in row.metrics.items() if "ala" not in name}
    return replace(row, metrics=metrics)


def test_fedala_switched_on_late_is_fedavg_until_then():
    late, fedavg = final("fedala", {"fedala.start_round": 4}), final("fedavg")
    same_rows([without_ala(row) for row in late[1][:3]], fedavg[1][:3], 0)
    assert late[1][3].metrics["ala_epochs"] > 1
    assert late[1][3].loss != fedavg[1][3].loss


def test_fedala_keeps_the_received_lower_layers_and_blends_the_upper_ones():
    _, _, models = final("fedala")
    blended = 0
    for client in range(len(SIZES)):
        for name, value in models[0, client].items():
            if not name.startswith("out."):
                assert torch.equal(value, models[0, None][name])
            else:
                blended += int(not torch.equal(value, models[0, None][name]))
    assert blended > 0


def test_the_first_round_is_skipped_and_later_ones_are_not():
    _, rows, _ = final("fedala")
    assert rows[0].metrics["ala_epochs"] == 0
    assert rows[1].metrics["ala_epochs"] > 1
    assert 0 < rows[2].metrics["ala_epochs"] <= 1


def test_clients_that_join_late_start_their_initial_stage_late():
    """A client that first gets a model other than its own learns until W has settled."""
    simulation, _, _ = simulate(
        "fedala", ragged_task([9] * 8), rounds=1, join_ratio=0.25, settings={"ala.threshold": 0.003}
    )
    assert not any(state["ala"]["trained"].any() for state in simulation.clients.values())
    learned, late = set(), []
    for round in range(2, 13):
        joined = simulation.draw_participants(0, round)
        [row] = [evaluation.row for evaluation in simulation.step(round, train=True)]
        newcomers = set(joined) - learned
        assert (
            row.metrics["ala_epochs"] > 10
            if len(newcomers) == len(joined)
            else row.metrics["ala_epochs"] >= 1
        )
        if not newcomers:
            assert row.metrics["ala_epochs"] == 1
        late += [round] * len(newcomers)
        learned |= newcomers
        assert all(bool(simulation.clients[0, client]["ala"]["trained"][0]) for client in joined)
    assert len(set(late)) > 2, "clients should have joined at different times for this test to bite"


def test_ditto_with_ala_leaves_the_global_track_alone():
    assert_close(final("ditto+ala")[2][0, None], final("fedavg")[2][0, None], 0)
    plain, with_ala = final("ditto"), final("ditto+ala")
    assert (plain[2][0, 1]["out.weight"] - with_ala[2][0, 1]["out.weight"]).abs().max() > 1e-4


def test_fedavg_with_ala_is_fedala():
    assert make("fedavg+ala") == make("fedala")


# --- by name --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("fedalla", {}, "did you mean fedala"),
        ("fedprox+alb", {}, "no method"),
        ("fedala+ala", {}, "fedala\\+ala is refused: FedALA is FedAvg with ALA already"),
        ("local+ala", {}, "refused"),
        ("fedfomo+ala", {}, "fedfomo\\+ala is refused: FedFomo downloads several models"),
        ("apple+ala", {}, "apple\\+ala is refused: APPLE downloads several models"),
        ("fedprox", {"fedprox.nu": 1}, "no option fedprox.nu"),
        ("fedprox", {"fedprox.mu": -1}, "fedprox.mu must be at least 0"),
        ("ditto", {"ditto.epochs": "1.5"}, "whole number"),
        ("fedala", {"fedala.sample": float("nan")}, "must be a number"),
        ("ditto+ala", {"ala.eta": 0}, "ala.eta must be greater than 0"),
    ],
)
def test_refusals(name, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        make(name, settings)


def test_settings_reach_the_method():
    method = make("ditto+ala", {"ditto.lam": "0.5", "ala.layers": 2})
    assert (method.base.lam, method.ala.layers) == (0.5, 2)
    assert make("fedala", {"ala.eta": 2.0, "fedala.eta": 0.5}).ala.eta == 0.5


def test_a_method_is_found_by_being_in_the_folder():
    assert set(catalogue()) >= {"fedala", "fedavg", "fedprox", "local", "ditto"}
    assert all(methods.make(name).title == entry.title for name, entry in catalogue().items())


def test_every_method_has_a_kind_and_is_listed_once():
    kinds = methods.list_kinds()
    assert tuple(kinds) == KINDS
    assert sorted(entry.name for entries in kinds.values() for entry in entries) == [*catalogue()]
