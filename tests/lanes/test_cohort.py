"""Lane independence: any lane of a cohort gives what that client alone gives."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small import Net, assert_close, ragged_task, same_rows, simulate, start_of
from torch import nn

from fedala import UserError, run
from fedala.ala import make_reports
from fedala.data import Dataset as Data
from fedala.lanes.cohort import Cohort
from fedala.lanes.layers import upper
from fedala.lanes.local_aggregation import init_state, initialize
from fedala.lanes.messages import Message
from fedala.lanes.parameters import model_state
from fedala.lanes.samples import iterate_steps
from fedala.lanes.trees import join, take
from fedala.lanes.uploads import Piece, Uploads
from fedala.lanes.weight_learning import Settings
from fedala.methods import make
from fedala.simulation import Simulation

#: Zero to nine batches of four, whole and partial, two of one size.
SIZES = [37, 36, 30, 21, 21, 16, 8, 5, 4, 3, 3, 1, 0]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def stacked(task, dtype_seeds):
    start = start_of(task)
    return join([start(seed) for seed in dtype_seeds])


def alone(task, cohort, lane, **options):
    return Cohort(
        task, [cohort.clients[lane]], [cohort.seeds[lane]], cohort.round, cohort.rounds, **options
    )


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def task(request):
    return ragged_task(SIZES, dtype=request.param)


@pytest.fixture
def cohort(task):
    return Cohort(
        task, list(range(len(SIZES))), [5 + i % 2 for i in range(len(SIZES))], round=3, rounds=9
    )


def test_sgd_in_lanes_is_each_clients_own_sgd(task, cohort):
    params = stacked(task, range(len(SIZES)))
    together = cohort.fit(params, epochs=2)
    for lane in range(len(SIZES)):
        own = take(params, slice(lane, lane + 1))
        assert_close(
            take(together, slice(lane, lane + 1)),
            alone(task, cohort, lane).fit(own, epochs=2),
            TOLERANCE[task.dtype],
        )


def test_sgd_leaves_its_start_alone_and_does_train(task, cohort):
    params = stacked(task, [0] * len(SIZES))
    before = {name: value.clone() for name, value in params.items()}
    after = cohort.fit(params)
    assert_close(params, before, 0)
    for lane, size in enumerate(SIZES):
        moved = (after["out.weight"][lane] - before["out.weight"][lane]).abs().max().item()
        assert (moved > 0) == (size > 0)
        # One update of running statistics per step: full batches only, but a small client trains
        # on all that it has.
        assert after["norm.num_batches_tracked"][lane] == (
            size // 4 if size >= 4 else int(size > 0)
        )


def test_ala_in_lanes_is_each_clients_own_ala(task, cohort):
    local, received = stacked(task, range(len(SIZES))), start_of(task)(99)
    received = {
        name: value.expand(len(SIZES), *value.shape[1:]) for name, value in received.items()
    }
    governed = upper(task.model, 2)
    settings_ = Settings(layers=2, max_epochs=30, threshold=0.003)
    state = init_state(local, governed)
    state["trained"][::3] = True  # some lanes are past their initial stage
    cohort.received, cohort.source = Message(received), [0] * len(SIZES)
    together, state_after, outcome = initialize(
        cohort, settings_, state, local, received, governed=governed
    )
    reports = make_reports(outcome, settings_)
    assert len({report.epochs for report in reports}) > 3, (
        "lanes should stop at different epochs for this test to bite"
    )
    for lane in range(len(SIZES)):
        own = slice(lane, lane + 1)
        single = alone(task, cohort, lane, received=Message(take(received, own)), source=[0])
        one, one_state, outcome = initialize(
            single,
            settings_,
            take(state, own),
            take(local, own),
            take(received, own),
            governed=governed,
        )
        [report] = make_reports(outcome, settings_)
        assert report.epochs == reports[lane].epochs
        assert report.converged == reports[lane].converged
        assert np.allclose(report.losses, reports[lane].losses, atol=TOLERANCE[task.dtype])
        assert_close(take(together, own), one, TOLERANCE[task.dtype])
        assert_close(take(state_after["weights"], own), one_state["weights"], TOLERANCE[task.dtype])
        assert state_after["trained"][lane] == one_state["trained"][0]


@pytest.mark.parametrize("shared", [False, True])
def test_evaluation_in_lanes_is_each_clients_own(task, cohort, shared):
    params = stacked(task, range(len(SIZES)))
    if shared:  # one model for all: it goes through in large batches
        params = {
            name: value[:1].expand(len(SIZES), *value.shape[1:]) for name, value in params.items()
        }
        cohort.received, cohort.source = Message(params), [0] * len(SIZES)
    score = cohort.evaluate(params)
    for lane, client in enumerate(cohort.clients):
        own = alone(task, cohort, lane).evaluate(take(params, slice(lane, lane + 1)))
        model = Net().to(task.dtype).eval()
        model.load_state_dict({name: value[lane] for name, value in params.items()})
        rows = torch.as_tensor(task.parts["test"][client])
        output = model(task.x[rows])
        assert score.score[lane] == own.score[0] == (output.argmax(1) == task.y[rows]).sum()
        assert score.samples[lane] == own.samples[0] == len(rows)
        expected = nn.functional.cross_entropy(output, task.y[rows], reduction="sum").item()
        assert score.loss[lane].item() == pytest.approx(expected, rel=1e-5)
        assert own.loss[0].item() == pytest.approx(expected, rel=1e-5)


def test_a_shared_body_is_evaluated_once_and_right(task, cohort):
    """FedALA evaluates received lower layers under own upper ones. This model can be cut."""
    from fedala.models import cnn

    cut_task = ragged_task([9, 5, 2], model=cnn((1, 16, 16), 3), dtype=task.dtype)
    cut_task.x = torch.randn(
        len(cut_task.x), 1, 16, 16, generator=torch.Generator().manual_seed(0)
    ).to(task.dtype)
    start = start_of(cut_task, lambda: cnn((1, 16, 16), 3))
    received = {n: v.expand(3, *v.shape[1:]) for n, v in start(1).items()}
    own = join([start(seed) for seed in (2, 3, 4)])
    params = {n: own[n] if n.startswith("fc2") else received[n] for n in received}
    shared = Cohort(
        cut_task, [0, 1, 2], [0, 0, 0], received=Message(received), source=[0, 0, 0]
    ).evaluate(params)
    plain = Cohort(cut_task, [0, 1, 2], [0, 0, 0]).evaluate(
        {n: v.clone() for n, v in params.items()}
    )
    assert torch.equal(shared.score, plain.score)
    assert torch.allclose(shared.loss, plain.loss, rtol=1e-5)


def test_the_gradient_of_a_padding_row_is_spared_in_every_lane():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 4, padding_idx=0)
            self.out = nn.Linear(4, 3)

        def forward(self, x):
            return self.out(self.embedding(x).mean(1))

    task = ragged_task([8, 8, 4], model=Words())
    task.x = torch.randint(0, 7, (len(task.x), 5), generator=torch.Generator().manual_seed(0))
    params = join([start_of(task, Words)(seed) for seed in range(3)])
    trained = Cohort(task, [0, 1, 2], [0, 0, 0]).fit(params)
    assert trained["embedding.weight"][:, 0].abs().max() == 0
    assert (
        (trained["embedding.weight"] - params["embedding.weight"])[:, 1:].abs().amax((1, 2)) > 0
    ).all()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 7), st.booleans())
@settings(max_examples=100, deadline=None)
def test_steps_visit_every_sample_once_and_drop_only_what_they_may(lengths, size, drop_last):
    lengths = sorted(lengths, reverse=True)
    seen = [[] for _ in lengths]
    for lanes, columns in iterate_steps(lengths, size, drop_last=drop_last):
        assert columns.stop - columns.start <= size
        for lane in range(lanes.start, lanes.stop):
            seen[lane] += range(columns.start, columns.stop)
    for lane, length in enumerate(lengths):
        end = length if not drop_last or length < size else length - length % size
        assert seen[lane] == list(range(end))


def test_average_is_weighted_and_leaves_counters_whole():
    params = {"w": torch.tensor([[1.0], [4.0]]), "n": torch.tensor([3, 9])}
    pieces = [Piece(Message(params), [0, 1], [0, 1])]
    mean = Uploads([0, 1], torch.tensor([1.0, 2.0]), pieces).average().model
    assert mean["w"].tolist() == [[3.0]]
    assert mean["n"].tolist() == [3]


def test_unsorted_lanes_are_refused(task):
    with pytest.raises(ValueError, match="sorted"):
        Cohort(task, [5, 0], [0, 0])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("model", ["cnn", "own"])
def test_features_that_do_not_fit_are_computed_again_with_the_same_result(
    layers, model, monkeypatch
):
    """Without memory for features, ALA learns on the samples, and the result is the same."""
    from fedala.models.cnn import cnn

    build = (lambda: cnn((1, 28, 28), 3)) if model == "cnn" else Net
    found, cuts = [], []

    def seen(self, cut, *args, features=Cohort.features):
        cuts.append(cut.cuts)
        return features(self, cut, *args)

    monkeypatch.setattr(Cohort, "features", seen)
    for memory in (None, 0):
        task = ragged_task([9, 6, 5], model=build(), feature_memory=memory)
        if model == "cnn":
            task.x = torch.nn.functional.interpolate(task.x, (28, 28))
        simulation = Simulation(
            make("fedala", {"ala.layers": layers}), task, start_of(task, build), rounds=2
        )
        found.append([evaluation.row.loss for evaluation in simulation.run()])
        if model == "cnn" or layers == 1:
            assert any(cuts) == (memory is None)
        cuts.clear()
    assert found[0] == pytest.approx(found[1], rel=1e-9)


# --- models that notice layouts or vmap -----------------------------------------------------------


class TutorialNet(nn.Module):
    """The network of the PyTorch tutorial, for smaller images: it flattens with `view`."""

    def __init__(self):
        super().__init__()
        self.conv1, self.pool, self.conv2 = (
            nn.Conv2d(1, 4, 3),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(4, 6, 3),
        )
        self.fc1, self.fc2, self.fc3 = nn.Linear(6 * 3 * 3, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 6 * 3 * 3)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Fussy(nn.Module):
    """A convolution before a function that may depend on the memory layout of its input."""

    def __init__(self, through, convolution=lambda: nn.Conv2d(1, 4, 3)):
        super().__init__()
        self.conv, self.norm, self.fc, self.through = (
            convolution(),
            nn.BatchNorm1d(144),
            nn.Linear(144, 3),
            through,
        )

    def forward(self, x):
        return self.fc(self.norm(self.through(self, self.conv(x)).flatten(1)))


def check_contiguous(model, h):
    assert h.is_contiguous()
    return h


def read_pointer(model, h):
    h.data_ptr()
    return h


def branch_on_value(model, h):
    return h if h.mean().item() > 1e3 else h.relu()


def three_dimensional():
    convolution = nn.Sequential(nn.Unflatten(1, (1, 1)), nn.Conv3d(1, 4, (1, 3, 3)))
    return Fussy(lambda model, h: h.view(len(h), -1), lambda: convolution)


class FourDimensional(nn.Module):
    """A parameter of four dimensions that is not a convolution's weight, but a bias."""

    def __init__(self):
        super().__init__()
        self.bias, self.fc = nn.Parameter(torch.randn(1, 2, 8, 8)), nn.Linear(128, 3)

    def forward(self, x):
        return self.fc((x + self.bias).flatten(1)) + self.bias.view(-1)[:3]


#: How a model is built, whether it accepts weights channels last, whether it runs under vmap.
NOTICING = {
    "plain": (lambda: Fussy(lambda model, h: h.tanh()), True, True),
    "tutorial": (TutorialNet, False, True),
    "one row": (lambda: Fussy(lambda model, h: h.view(-1).view(len(h), -1)), False, False),
    "contiguous": (lambda: Fussy(check_contiguous), False, False),
    "stride": (lambda: Fussy(lambda model, h: h * 3 if h.stride(1) == 1 else h), False, True),
    "pointer": (lambda: Fussy(read_pointer), True, False),
    "value": (lambda: Fussy(branch_on_value), True, False),
    "in training": (
        lambda: Fussy(lambda model, h: h.view(len(h), -1) if model.training else h),
        False,
        True,
    ),
    "in evaluation": (
        lambda: Fussy(lambda model, h: h if model.training else h.view(len(h), -1)),
        False,
        True,
    ),
    "dropout": (lambda: Fussy(lambda model, h: F.dropout2d(h, 0.2, model.training)), True, True),
    "parameter": (FourDimensional, False, True),
    "3-d": (three_dimensional, False, True),
}


def noticing_task(name, sizes=(9, 8, 5, 2), **settings):
    build = NOTICING[name][0]
    task = ragged_task(list(sizes), model=build(), **settings)
    side = 20 if build is TutorialNet else 8
    task.x = F.interpolate(task.x, (side, side))
    return task, build


@pytest.mark.parametrize("name", NOTICING)
def test_a_model_is_tried_before_it_gets_another_layout_or_vmap(name):
    task, _ = noticing_task(name)
    weights = [p.detach().clone() for p in task.model.parameters()]
    random = torch.get_rng_state()
    assert (task.uses_channels_last, task.uses_vmap) == NOTICING[name][1:]
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, weights, task.model.parameters()))
    assert task.model.training


@pytest.mark.parametrize(
    ("batch_size", "sizes", "uses_vmap"),
    [(4, range(5, 99), True), (8, range(5, 99), False), (8, range(5), False), (8, (), True)],
)
def test_a_model_is_tried_with_a_whole_batch_and_with_a_few_samples(batch_size, sizes, uses_vmap):
    """It does not run in lanes if it looks at its numbers in batches of such a size."""

    def branch(model, h):
        return h if len(h) in sizes and h.mean().item() > 1e3 else h.relu()

    task = ragged_task([9, 8, 5, 2], model=Fussy(branch), batch_size=batch_size)
    task.x = F.interpolate(task.x, (8, 8))
    assert task.uses_vmap == uses_vmap


@pytest.mark.parametrize("name", [name for name in NOTICING if name != "dropout"])
def test_any_model_gives_the_same_in_one_lane_or_several_and_what_plain_torch_gives(name):
    found = []
    for lanes in (1, 3, None):
        task, build = noticing_task(name)
        simulation = Simulation(
            make("fedala", {"ala.max_epochs": 3}),
            task,
            start_of(task, build),
            rounds=2,
            lanes=lanes,
        )
        found.append([evaluation.row.loss for evaluation in simulation.run()])
        state = simulation.servers[0]["global"]
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert found[0] == pytest.approx(found[2], rel=1e-9)
    # One client's SGD, in plain torch.
    task, build = noticing_task(name, shuffle=False)
    model = build().double()
    model.load_state_dict({n: v[0] for n, v in state.items()})
    trained = {n: v[0] for n, v in Cohort(task, [1], [0]).fit(state).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in (slice(0, 4), slice(4, 8)):
        rows = torch.as_tensor(task.parts["train"][1][batch])
        optimizer.zero_grad()
        F.cross_entropy(model(task.x[rows]), task.y[rows]).backward()
        optimizer.step()
    assert_close(trained, dict(model.state_dict()), 1e-10)


def test_fedala_run_takes_such_models_in_any_number_of_lanes():
    """In `run`, the skeleton has no numbers. This model ends in batch normalisation."""

    def build():
        return nn.Sequential(TutorialNet(), nn.BatchNorm1d(3))

    draw = np.random.default_rng(0)
    x, y = (
        torch.from_numpy(draw.normal(size=(60, 1, 20, 20))).float(),
        torch.from_numpy(draw.integers(0, 3, 60)),
    )
    losses = []
    for lanes in ("auto", "1", "3", "all"):
        result = run(
            dataset=Data("own", x, y, 3),
            model=build,
            method="fedala",
            rounds=2,
            clients=4,
            partition="iid",
            lanes=lanes,
            device="cpu",
            set={"fedala.max_epochs": 2},
        )
        losses.append([row.loss for row in result.history])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_the_trial_depends_on_nothing_that_a_run_changes():
    """A resumed run may try the model with other states, and must decide as the first run did."""
    task, _ = noticing_task("plain")
    for value in (float("nan"), 1e30):
        other, _ = noticing_task("plain")
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.fill_(value)
        assert other.uses_channels_last == task.uses_channels_last
        assert other.uses_vmap == task.uses_vmap
    assert task.copy_for_thread().uses_channels_last


@pytest.mark.parametrize("foreign", [False, True])
def test_common_models_keep_the_fast_layout(foreign):
    """A trial on the meta device, as in a run. A ResNet's last maps here are of one pixel."""
    from fedala.models import cnn, resnet18

    for model, shape in ((cnn((1, 16, 16), 3), (16, 16)), (resnet18((1, 16, 16), 3), (16, 16))):
        task = ragged_task([4], model=model, dtype=torch.float32)
        task.x = F.interpolate(task.x, shape)
        task.model = (nn.Sequential(model) if foreign else model).to("meta")
        assert task.uses_channels_last
        weight = task.lay_out(torch.randn(1, 8, 4, 3, 3))
        assert weight.squeeze(0).is_contiguous(memory_format=torch.channels_last)


def test_large_embeddings_learn_in_lanes_without_vmap():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(3000, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = self.embedding(x).mean(1)
            h.data_ptr()
            return self.out(h)

    task = ragged_task([8, 8, 4], model=Words())
    task.x = torch.randint(0, 3000, (len(task.x), 5), generator=torch.Generator().manual_seed(0))
    params = join([start_of(task, Words)(seed) for seed in range(3)])
    together = Cohort(task, [0, 1, 2], [0, 0, 0]).fit(params)
    assert not task.uses_vmap
    for lane in range(3):
        own = slice(lane, lane + 1)
        assert_close(take(together, own), Cohort(task, [lane], [0]).fit(take(params, own)), 1e-12)


class ReturnsMore(Net):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x))


@pytest.mark.parametrize(
    ("wrap", "sentence"),
    [
        (lambda z: ((z, z), z), "returns a tuple"),
        (lambda z: {"scores": z}, "returns a dict"),
        (lambda z: z.sum(1), "2 dimensions"),
    ],
)
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_model_that_does_not_return_scores_is_refused(wrap, sentence, lanes):
    task = ragged_task([8, 4], model=ReturnsMore(wrap))
    simulation = Simulation(
        make("fedavg"), task, start_of(task, lambda: ReturnsMore(wrap)), lanes=lanes
    )
    with pytest.raises(UserError, match=sentence):
        list(simulation.run())


@pytest.mark.parametrize(
    "wrap",
    [lambda z: (z, z), lambda z: {"logits": z, "cache": 1}, lambda z: SimpleNamespace(logits=z)],
)
def test_a_model_may_return_its_scores_in_a_tuple_a_dict_or_an_object(wrap):
    """Also if it is the server's own, which runs for all clients at once."""
    plain = ragged_task([8, 4])
    task = ragged_task([8, 4], model=ReturnsMore(wrap))
    _, expected, _ = simulate("fedavg", plain, rounds=1)
    simulation = Simulation(make("fedavg"), task, start_of(plain), rounds=1)
    same_rows([evaluation.row for evaluation in simulation.run()], expected, 1e-12)


@pytest.mark.parametrize("make_model", [nn.Flatten, lambda: nn.BatchNorm2d(1, affine=False)])
def test_a_model_without_parameters_is_refused(make_model):
    with pytest.raises(UserError, match="no parameters"):
        ragged_task([4], model=make_model())


def test_a_model_that_uses_none_of_its_parameters_is_refused():
    task = ragged_task([4], model=ReturnsMore(lambda z: z.detach()))
    with pytest.raises(UserError, match=r"does not depend on.*conv\.weight"):
        Cohort(task, [0], [0]).fit(start_of(task)(0))


def test_a_frozen_model_stays_as_it_is():
    task = ragged_task([8, 4], model=Net().requires_grad_(False))
    params = stacked(task, [0, 1])
    after = Cohort(task, [0, 1], [0, 0]).fit(params)
    assert torch.equal(after["out.weight"], params["out.weight"])
    assert Cohort(task, [0, 1], [0, 0]).fit(params)["norm.num_batches_tracked"].tolist() == [2, 1]


def test_a_lazy_model_is_refused():
    with pytest.raises(UserError, match=r"1\.weight.*lazy"):
        model_state(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)))


# --- numbers that are not finite ------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("what", ["data", "local", "received"])
def test_a_lane_that_is_not_finite_keeps_its_weights_and_disturbs_no_other(what, trained):
    """Lane 1 of three gets a NaN. The others are, but for rounding, as with a finite lane 1."""

    def learn(poisoned):
        task = ragged_task([12, 8, 5])
        cohort = Cohort(task, [0, 1, 2], [0, 0, 0], round=2)
        local, received = stacked(task, [1, 2, 3]), stacked(task, [4, 5, 6])
        governed = upper(task.model, 1)
        state = init_state(local, governed)
        if trained:
            state["trained"][:] = True
            for name in governed:
                state["weights"][name] = torch.full_like(state["weights"][name], 0.25)
        if poisoned and what == "data":
            task.x[torch.as_tensor(task.parts["train"][1])] = float("nan")
        elif poisoned:
            (local if what == "local" else received)["out.weight"][1, 0, 0] = float("inf")
        settings = Settings(max_epochs=3, sample=1.0)
        return (
            local,
            received,
            *initialize(cohort, settings, state, local, received, governed=governed),
        )

    _, _, sound, sound_state, sound_outcome = learn(poisoned=False)
    local, received, found, state, outcome = learn(poisoned=True)
    for lane in (0, 2):
        part = slice(lane, lane + 1)
        assert_close(take(found, part), take(sound, part), 1e-14)
        assert_close(take(state["weights"], part), take(sound_state["weights"], part), 1e-14)
    assert outcome.epochs.tolist() == [
        int(sound_outcome.epochs[0]),
        0,
        int(sound_outcome.epochs[2]),
    ]
    assert state["trained"].tolist() == [True, trained, True]
    reports = make_reports(outcome, Settings(max_epochs=3))
    assert [report.fault is None for report in reports] == [True, False, True]
    assert reports[1].losses == ()
    assert not reports[1].initial
    for name, value in state["weights"].items():
        assert (value[1] == (0.25 if trained else 1)).all()
        blend = local[name][1] + (received[name][1] - local[name][1]) * 0.25
        expected = blend if what == "data" and trained else received[name][1]
        assert torch.equal(found[name][1], expected)
