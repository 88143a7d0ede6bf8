"""Augmented batches: the reference for given draws, keyed draws, and where they apply."""

import numpy as np
import pytest
import torch
from small import Net, assert_close, ragged_task, same_rows, simulate, start_of

from fedala.errors import UserError
from fedala.lanes.augmentation import Augmentation, parse_augmentation
from fedala.lanes.cohort import Cohort
from fedala.lanes.normalization import Normalization
from fedala.lanes.randomness import draw
from fedala.lanes.task import Task
from fedala.lanes.trees import join, take

SIZES = [13, 9, 9, 6, 3, 1, 0]
BOTH = Augmentation(flip=True, padding=2)


def transform_by_hand(image, padding, down, right, flip):
    """Pad an image C×H×W with zeros, crop its size at (down, right), and mirror it."""
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    height, width = image.shape[1:]
    cropped = padded[:, down : down + height, right : right + width]
    return cropped[:, :, ::-1] if flip else cropped


def list_transforms(padding):
    offsets = range(2 * padding + 1)
    return [(down, right, flip) for down in offsets for right in offsets for flip in (0, 1)]


@pytest.mark.parametrize("kind", ["bytes", "floats"])
@pytest.mark.parametrize("normalization", [None, Normalization((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_every_transform_is_padding_with_zeros_then_crop_then_flip(kind, normalization, padding):
    """Zeros of the image before it is normalised, as with torchvision's transforms."""
    random, transforms = np.random.default_rng(0), list_transforms(padding)
    shape = (len(transforms), 3, 5, 7)
    images = random.integers(1, 256, shape).astype(np.uint8)
    if kind == "floats":
        images = random.random(shape, dtype=np.float32) + 1
    wanted = np.stack(
        [
            transform_by_hand(image, padding, *transform)
            for image, transform in zip(images, transforms, strict=True)
        ]
    )
    y, rows = torch.arange(len(images)), np.arange(len(images))
    x = torch.from_numpy(images)
    options = {"normalization": normalization, "augmentation": Augmentation(True, padding)}
    task = Task(Net(), x, y, [rows], **options)
    plain = Task(Net(), torch.from_numpy(wanted.copy()), y, [rows], normalization=normalization)
    order = torch.from_numpy(rows * len(transforms) + np.arange(len(transforms))).view(2, -1)
    inputs, targets = task.training_batch(order)
    assert torch.equal(inputs.flatten(0, 1), plain.inputs(y))
    assert torch.equal(targets.flatten(), y)


def test_draws_are_even():
    drawn = BOTH.draw(draw(3, "x"), 20_000)
    counts = np.bincount(drawn, minlength=BOTH.transforms)
    assert len(counts) == BOTH.transforms == 50
    assert counts.min() > 300  # 400 of each are expected, with a standard deviation of 20
    assert abs((drawn % 2).mean() - 0.5) < 0.015
    only_crops = Augmentation(padding=2).draw(draw(3, "x"), 2_000)
    assert set(only_crops) == set(range(0, 50, 2))
    assert set(Augmentation(flip=True).draw(draw(3, "x"), 99)) == {0, 1}


class Record:
    """A step that learns nothing and keeps its inputs, by lane."""

    def __init__(self, lanes):
        self.inputs = [[] for _ in range(lanes)]

    def __call__(self, task, state, fixed, x, y):
        for lane, images in zip(state["lane"].tolist(), x, strict=True):
            self.inputs[lane].append(images.clone())
        return torch.zeros(len(x), dtype=task.dtype)


def record(task, clients, seeds, round=1, **options):
    """Return the images that each lane trains on, in their order."""
    step = Record(len(clients))
    state = {"lane": torch.arange(len(clients))}
    Cohort(task, clients, seeds, round=round).train(step, state, **options)
    empty = torch.empty(0, *task.x.shape[1:], dtype=task.dtype)
    return [torch.cat([empty, *batches]) for batches in step.inputs]


def test_a_batch_has_the_drawn_transforms_of_its_samples():
    task = ragged_task([8], augmentation=BOTH)
    cohort = Cohort(task, [0], [5], round=3)
    found = record(task, [0], [5], round=3, epochs=2)[0]
    wanted = []
    for epoch in range(2):
        samples = cohort.shuffle(0, task.parts["train"][0], "batches", epoch)
        drawn = BOTH.draw(cohort.draw(0, "batches augmentation", epoch), len(samples))
        for sample, transform in zip(samples, drawn, strict=True):
            down, right, flip = list_transforms(2)[transform]
            image = transform_by_hand(task.x[sample].numpy(), 2, down, right, flip)
            wanted.append(torch.from_numpy(image.copy()))
    assert torch.equal(found, torch.stack(wanted))


def test_a_lane_sees_what_its_client_alone_sees():
    task, clients, seeds = ragged_task(SIZES, augmentation=BOTH), range(len(SIZES)), [1, 2] * 4
    together = record(task, clients, seeds[: len(SIZES)], round=4, epochs=2)
    for client in clients:
        [alone] = record(task, [client], [seeds[client]], round=4, epochs=2)
        assert torch.equal(together[client], alone)


def test_training_in_lanes_is_each_clients_own():
    task = ragged_task(SIZES, augmentation=BOTH)
    params = join([start_of(task)(seed) for seed in range(len(SIZES))])
    together = Cohort(task, range(len(SIZES)), [0] * len(SIZES)).fit(params, epochs=2)
    plain = ragged_task(SIZES)
    unchanged = Cohort(plain, range(len(SIZES)), [0] * len(SIZES)).fit(params, epochs=2)
    for client, size in enumerate(SIZES):
        own = slice(client, client + 1)
        alone = Cohort(task, [client], [0]).fit(take(params, own), epochs=2)
        assert_close(take(together, own), alone, 1e-10)
        is_same = torch.equal(together["out.weight"][client], unchanged["out.weight"][client])
        assert is_same == (size == 0)


def test_draws_depend_on_seed_client_round_purpose_and_epoch():
    """Without shuffling, every difference is one of augmentation."""
    task = ragged_task([12, 12], augmentation=BOTH, shuffle=False)
    rows = [task.parts["train"][0]]

    def see(seed=0, client=0, **options):
        return record(task, [client], [seed], **{"rows": rows, "epochs": 1, **options})[0]

    first = see()
    assert torch.equal(first, see())
    others = [see(seed=1), see(client=1), see(round=2), see(purpose="head")]
    two = see(epochs=2)
    assert torch.equal(two[:12], first)
    for other in [*others, two[12:]]:
        assert not torch.equal(first, other)


def test_the_order_of_samples_does_not_depend_on_augmentation():
    task, plain = (ragged_task([9], augmentation=a) for a in (BOTH, None))
    packed, order = (
        Cohort(t, [0], [2])._order_samples(t.parts["train"], "batches", 0, None)
        for t in (task, plain)
    )
    assert torch.equal(packed // BOTH.transforms, order)
    assert torch.equal(torch.sort(order[0]).values, torch.arange(9))


@pytest.mark.parametrize("method", ["fedala", "fedrep"])
def test_early_draws_are_the_same(method):
    """As on a GPU, which makes the draws of the next round while it works."""
    tasks = [ragged_task(SIZES[:4], augmentation=BOTH) for _ in range(2)]
    tasks[1].backend.predraws = True
    (_, rows, models), (_, early, others) = (simulate(method, t, rounds=3) for t in tasks)
    assert tasks[1].predrawn
    same_rows(rows, early, 0)
    for key in models:
        assert_close(models[key], others[key], 0)


@pytest.mark.parametrize("method", ["fedala", "fedfomo", "per-fedavg", "fedavg-c"])
def test_only_training_is_augmented(method, monkeypatch):
    """Neither evaluation nor ALA's weight learning nor FedFomo's held-out losses are."""
    is_training, applied = [], []
    train, apply = Cohort.train, Augmentation.apply

    def flagged_train(self, *args, **options):
        is_training.append(True)
        trained = train(self, *args, **options)
        is_training.pop()
        return trained

    def counted_apply(self, *args):
        assert is_training
        applied.append(True)
        return apply(self, *args)

    monkeypatch.setattr(Cohort, "train", flagged_train)
    monkeypatch.setattr(Augmentation, "apply", counted_apply)
    simulate(method, ragged_task(SIZES[:3], augmentation=BOTH), rounds=2)
    assert applied


def test_adapting_is_training_with_its_own_draws(monkeypatch):
    """Per-FedAvg adapts on the client's first B samples, twice a round, with the same draws."""
    task, seen = ragged_task([8], augmentation=BOTH), []
    batch = Task.training_batch

    def see(self, order):
        seen.append(order.clone())
        return batch(self, order)

    monkeypatch.setattr(Task, "training_batch", see)
    simulate("per-fedavg", task, rounds=1)
    before, meta, after, last = seen
    assert meta.shape == (1, 8)
    assert torch.equal(before, after)
    assert not torch.equal(after, last)  # the last evaluation is that of another round
    for adapted in (before, after, last):
        samples = set((adapted // BOTH.transforms)[0].tolist())
        assert samples == set(task.parts["train"][0][:4].tolist())


@pytest.mark.parametrize("method", ["ditto", "fedrep", "fedavg-c", "fedprox-c"])
def test_two_trainings_of_a_round_have_draws_of_their_own(method, monkeypatch):
    """Neither epoch repeats an order or the images of the other training, shuffled or not."""
    task, seen = ragged_task([4], augmentation=BOTH), []
    batch = Task.training_batch

    def see(self, order):
        seen.append(order.clone())
        return batch(self, order)

    monkeypatch.setattr(Task, "training_batch", see)
    simulate(method, task, rounds=1, settings={f"{method}.epochs": 2})
    first, second, last = (order for order in seen[:3])  # one batch is an epoch
    assert len({str(order.tolist()) for order in (first, second, last)}) == 3


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("none", None),
        ("flip", Augmentation(True)),
        ("crop:4", Augmentation(False, 4)),
        ("flip,crop:4", Augmentation(True, 4)),
        (" crop:12 , Flip", Augmentation(True, 12)),
    ],
)
def test_the_option_is_a_comma_list(text, wanted):
    assert parse_augmentation(text) == wanted


@pytest.mark.parametrize(
    "text",
    ["", "flop", "crop", "crop:", "crop:0", "crop:-1", "flip,flip", "crop:4,crop:2", "none,flip"],
)
def test_another_list_is_refused(text):
    with pytest.raises(UserError, match="augment must be none, flip, crop:4"):
        parse_augmentation(text)
