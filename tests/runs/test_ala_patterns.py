"""ALA on parameters that patterns choose, in runs: as on a number of layers, and as text."""

import pytest
from runs.test_resume import federation, planned, same, stop_after
from small import Net

from fedala import UserError, run
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.observer import Stopped

LAST = [name for name, _ in Net().named_parameters()][-1].rpartition(".")[0]


@pytest.mark.parametrize("method", ["fedala", "ditto+ala"])
def test_the_pattern_of_the_last_layer_equals_one_layer(method):
    histories = []
    for layers in (1, [LAST], LAST):
        result = run(
            method=method,
            dataset=federation(),
            model=Net,
            rounds=2,
            batch_size=4,
            lr=0.1,
            device="cpu",
            set={"ala.layers": layers},
        )
        histories.append([(row.score, row.loss) for row in result.methods[method].history])
    assert histories[0] == histories[1] == histories[2]


def test_patterns_are_text_in_a_config_and_survive_a_stop(tmp_path):
    patterns = {"fedala.layers": [LAST, r".*\.bias"]}
    checked = planned(set=patterns)
    assert checked.config.set == {"fedala.layers": rf"{LAST},.*\.bias"}
    execute(checked, tmp_path / "whole")
    assert RunFolder.open(tmp_path / "whole").config().set == checked.config.set
    with pytest.raises(Stopped):
        execute(planned(set=patterns), tmp_path / "two", observer=stop_after(2))
    execute(planned(set=patterns), tmp_path / "two", resume=tmp_path / "two")
    same(tmp_path / "whole", tmp_path / "two")


@pytest.mark.parametrize("layers", [[], ["a,b"], [1], 2.5, "2.5"])
def test_lists_and_numbers_that_are_not_patterns_are_refused(layers):
    with pytest.raises(UserError, match=r"fedala\.layers"):
        planned(set={"fedala.layers": layers})


def test_fedreps_head_cannot_be_chosen_alone():
    with pytest.raises(UserError, match="takes nothing that FedRep shares"):
        planned("fedrep+ala", set={"ala.layers": LAST})


def test_a_sweep_has_patterns_among_its_points():
    points = Config.from_values({"sweep": {"fedala.layers": f"1,{LAST}"}, "method": "fedala"})
    assert points.sweep == {"fedala.layers": f"1,{LAST}"}
