"""A small sample of `make corrupt`: damage is refused, told or healed, and never believed."""

import pytest
import torch
from corrupt.judge import BAD, Case, Judge
from corrupt.mutations import mutations
from corrupt.worlds import build

#: Folder, file, mutation (or how its name begins) and command.
SAMPLE = [
    ("finished", "history.csv", "empty", "run --resume"),
    ("finished", "history.csv", "removed", "run --resume"),
    ("finished", "history.csv", "half of it", "run --resume"),
    ("finished", "history.csv", "only the first line", "run --resume"),
    ("finished", "history.csv", "the last line dropped", "run --resume"),
    ("finished", "history.csv", "a middle line dropped", "report"),
    ("finished", "history.csv", "a digit of accuracy", "run --resume"),
    ("finished", "history.csv", "a digit of accuracy", "report"),
    ("finished", "history.csv", "nan for accuracy", "run --resume"),
    ("finished", "history.csv", "400 digits for round", "report"),
    ("finished", "clients.csv", "400 digits for samples", "report"),
    ("finished", "clients.csv", "a digit of accuracy", "report"),
    ("finished", "clients.csv", "removed", "run --resume --rounds 4"),
    ("finished", "metrics.csv", "a digit of", "report"),
    ("finished", "metrics.csv", "removed", "run --resume --rounds 4"),
    ("finished", "summary.json", "a lone surrogate", "report"),
    ("finished", "summary.json", "a digit of seconds", "report"),
    ("finished", "config.toml", "empty", "run --resume"),
    ("finished", "config.toml", "a digit of rounds", "run --resume"),
    ("finished", "config.toml", "a digit of partition_seed", "report"),
    ("finished", "split.csv", "a digit of train", "report"),
    ("finished", "split.csv", "a pipe", "report"),
    ("finished", "weights.csv", "a digit of mean", "report"),
    ("finished", "checkpoint/0/0000003.json", "half of it", "run --resume --rounds 4"),
    (
        "finished",
        "checkpoint/0/server-3.safetensors",
        "a bit flipped in the middle",
        "run --resume --rounds 4",
    ),
    (
        "finished",
        "models/fedala/seed-0/global.safetensors",
        "a bit flipped in the middle",
        "model()",
    ),
    (
        "finished",
        "models/fedala/seed-0/global.safetensors",
        "a bit flipped at the start",
        "model()",
    ),
    ("finished", "models/fedala/seed-0/global.safetensors", "removed", "model()"),
    ("finished", "models/best/fedala/seed-0/global.safetensors", "removed", "model()"),
    ("finished", "models/best/fedala/seed-0/global.safetensors", "all zeros", "model()"),
    ("finished", "models/best/fedala/seed-0/global.safetensors", "all zeros", "run --resume"),
    ("stopped", "history.csv", "a middle line dropped", "run --resume"),
    ("stopped", "history.csv", "a digit of accuracy", "run --resume"),
    ("stopped", "history.csv", "removed", "run --resume"),
    ("stopped", "history.csv", "empty", "report"),
    ("stopped", "config.toml", "a digit of rounds", "run --resume"),
    ("stopped", "checkpoint/1/0000002.json", "half of it", "run --resume"),
    ("stopped", "models/fedala/seed-0/global.safetensors", "all zeros", "model()"),
    ("cells", "mnist-pathological/fedavg/seeds-0-0/config.toml", "empty", "paper report"),
    (
        "cells",
        "mnist-pathological/fedavg/seeds-0-0/history.csv",
        "a digit of accuracy",
        "paper report",
    ),
    (
        "cells",
        "mnist-pathological/fedavg/seeds-0-0/history.csv",
        "a digit of accuracy",
        "paper run, again",
    ),
    ("cells", "mnist-pathological/fedavg/cell.json", "a digit of samples", "paper report"),
    ("cells", "results.csv", "a pipe", "paper report"),
    ("cells", "results.csv", "a link to a zero device", "paper report"),
    ("csv", "results.csv", "7.5 for best", "paper report"),
    ("csv", "results.csv", "-3 for best", "paper report"),
]


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    torch.set_num_threads(1)
    return Judge(tmp_path_factory.mktemp("copies"), repeats=1)


@pytest.fixture(scope="module")
def worlds(judge):
    return {
        world.name: world
        for world in build(judge.place, list(dict.fromkeys(s[0] for s in SAMPLE)), twins=False)
    }


@pytest.mark.parametrize("sample", SAMPLE, ids=" | ".join)
def test_damage_is_not_believed(sample, judge, worlds):
    name, file, mutation, command = sample
    world = worlds[name]
    [victim] = [path for path in world.victims() if str(path) == f"{world.folder}/{file}"]
    found = next(
        label for label in mutations(world.sound / victim, None) if label.startswith(mutation)
    )
    asked = next(one for one in world.commands if one.name == command)
    verdict, why = judge.judge(Case(world, victim, found, asked))
    assert verdict not in BAD, f"{verdict}: {why}"
