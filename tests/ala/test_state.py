"""ALA's state: saved, loaded, refused."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ala.common import EXACT, X, Y, assert_same, entries, make_learned_ala, mlp, poison, twins
from safetensors.torch import load_file, save_file

from fedala import ALA, UserError


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_loaded_ala_continues_as_if_uninterrupted(rounds, tmp_path):
    options = {"layers": 2, "sample": 0.5, "batch_size": 4, "max_epochs": 3, "seed": 3}

    def run_rounds(ala: ALA, seeds: Sequence[int]) -> list[Any]:
        given = []
        for seed in seeds:
            local, received = twins(mlp, seed)
            report = ala.initialize(local, received, (X, Y))
            given.append((report, [value.tolist() for value in entries(local).values()]))
        return given

    uninterrupted = run_rounds(ALA(**options), range(4))
    before = ALA(**options)
    run_rounds(before, range(rounds))
    save_file(before.state_dict(), tmp_path / "ala.safetensors")
    after = ALA(**options)
    after.load_state_dict(load_file(tmp_path / "ala.safetensors"))
    assert run_rounds(after, range(rounds, 4)) == uninterrupted[rounds:]
    assert list(after.weights) == ["2.weight", "2.bias", "4.weight", "4.bias"]


def test_state_dict_is_a_copy_in_the_models_order():
    ala = ALA(layers=2, max_epochs=2, batch_size=4)
    assert ala.weights == {}
    ala.initialize(*twins(mlp), (X, Y))
    kept = ala.state_dict()
    assert list(ala.weights) == ["2.weight", "2.bias", "4.weight", "4.bias"]
    before = {name: value.clone() for name, value in kept.items()}
    ala.initialize(*twins(mlp, 1), (X, Y))
    assert_same(kept, before, **EXACT)
    assert any(
        not torch.equal(ala.state_dict()[name], before[name])
        for name in before
        if name.startswith("weights.")
    )


@pytest.mark.parametrize(
    "tensors", [{}, {"weights.fc.bias": torch.ones(3)}, {"trained": torch.tensor(True)}]
)
def test_a_state_that_is_not_alas_is_refused(tensors):
    with pytest.raises(UserError, match="state"):
        ALA().load_state_dict(tensors)


SOUND = {
    "round": torch.tensor(3),
    "trained": torch.tensor(True),
    "weights.4.weight": torch.full((3, 5), 0.5),
    "weights.4.bias": torch.full((3,), 0.5),
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"weights.4.bias": poison(torch.ones(3))}, r"4\.bias must be between 0 and 1"),
        ({"weights.4.bias": poison(torch.ones(3), float("inf"))}, r"4\.bias must be between"),
        ({"weights.4.bias": poison(torch.ones(3), 1.5)}, r"4\.bias must be between"),
        ({"weights.4.bias": poison(torch.ones(3), -0.1)}, r"4\.bias must be between"),
        (
            {"weights.4.bias": torch.ones(3, dtype=torch.int64)},
            r"4\.bias must be a tensor of floating",
        ),
        ({"weights.4.bias": [1.0, 1.0, 1.0]}, r"4\.bias must be a tensor"),
        ({"round": torch.tensor(-5)}, "round must be a whole number.*-5"),
        ({"round": torch.tensor(2.5)}, r"round must be.*2\.5"),
        ({"round": torch.tensor([1, 2])}, "round must be"),
        ({"round": torch.tensor(float("nan"))}, "round must be"),
        ({"round": "3"}, "round must be"),
        ({"round": None}, "round must be"),
        ({"round": torch.tensor(2**62)}, "round must be"),
        ({"trained": torch.tensor([True, False])}, "trained must be"),
        ({"trained": torch.tensor(float("nan"))}, "trained must be"),
        ({"trained": True}, "trained must be"),
    ],
)
def test_a_state_that_is_not_sound_is_refused_and_changes_nothing(change, sentence):
    ala = make_learned_ala()
    before = ala.state_dict()
    with pytest.raises(UserError, match=sentence):
        ala.load_state_dict({**SOUND, **change})
    assert_same(ala.state_dict(), before, **EXACT)
    ala.load_state_dict(SOUND)
    assert_same(ala.state_dict(), {name: SOUND[name] for name in ala.state_dict()}, **EXACT)


@pytest.mark.parametrize("state", [None, 5, "state", [SOUND]])
def test_a_state_that_is_not_a_dict_is_refused(state):
    with pytest.raises(UserError, match="dict of tensors"):
        ALA().load_state_dict(state)
