"""Sweeps: the points, that each equals the run alone, and which one is picked."""

import json

import pytest
from runs.test_resume import federation, planned, rows_of, same, stop_after
from small import EACH_KIND, Net

from fedala import run
from fedala.errors import UserError
from fedala.methods import make
from fedala.records import HistoryRow
from fedala.report import page
from fedala.report.tables import describe_sweep
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.leaders import find_leaders
from fedala.runs.members import group_members, make_members
from fedala.runs.observer import Stopped
from fedala.runs.results import MethodResult
from fedala.runs.sweep import config_at, list_labels, list_points, split_label
from fedala.runs.sweep_results import find_sweeps


def config_of(**options):
    return Config.from_values({"lr": 0.1, "rounds": 3, **options})


def groups_of(**options):
    """The labels that run side by side."""
    groups = group_members(make_members(config_of(**options)))
    return [[member.label for member in group.members] for group in groups]


# --- points --------------------------------------------------------------------------------------


def test_a_grid_has_every_combination_that_a_method_knows():
    config = config_of(method="fedavg,fedprox", sweep={"lr": [0.1, 0.01], "fedprox.mu": "1,2"})
    assert list_labels(config) == [
        "fedavg[lr=0.1]",
        "fedavg[lr=0.01]",
        "fedprox[lr=0.1,fedprox.mu=1]",
        "fedprox[lr=0.1,fedprox.mu=2]",
        "fedprox[lr=0.01,fedprox.mu=1]",
        "fedprox[lr=0.01,fedprox.mu=2]",
    ]
    assert split_label("fedprox[lr=0.01,fedprox.mu=2]") == (
        "fedprox",
        {"lr": "0.01", "fedprox.mu": "2"},
    )


def test_a_point_is_a_config_of_its_own():
    config = config_of(method="fedprox", sweep={"lr": "0.1,0.01", "fedprox.mu": "1,2"})
    point = list_points(config, "fedprox")[-1]
    own = config_at(config, "fedprox", point)
    assert (own.lr, own.set, own.sweep) == (0.01, {"fedprox.mu": "2"}, {})


def test_random_points_are_drawn_from_their_range_and_stay_the_same():
    options = {"method": "fedavg", "sweep": {"lr": "log:0.001..0.1", "momentum": "0,0.9"}}
    config = config_of(**options, trials=50)
    points = list_points(config, "fedavg")
    rates = [float(point["lr"]) for point in points]
    assert 0.001 <= min(rates) < 0.003
    assert 0.03 < max(rates) <= 0.1
    assert sum(rate < 0.01 for rate in rates) == pytest.approx(25, abs=12)
    assert {point["momentum"] for point in points} == {"0", "0.9"}
    assert points == list_points(config_of(**options, trials=50), "fedavg")
    assert points[:20] == list_points(config_of(**options, trials=20), "fedavg")
    assert points != list_points(config_of(**options, trials=50, seed=1), "fedavg")


@pytest.mark.parametrize(
    ("sweep", "says"),
    [
        ({"rounds": "1,2"}, "sweep rounds: there is no such option to sweep"),
        ({"lr": "0.1,0.1"}, "give different values"),
        ({"lr": "0.1,"}, "give different values"),
        ({"lr": "log:0..1"}, "is not a range"),
        ({"lr": "log:1..x"}, "is not a range"),
        ({"lr": "0.1,fast"}, "lr must be a number"),
        ({"lr": "0.1,-1"}, "lr must be greater than 0"),
        ({"fedprox.mu": "1,2"}, "fedprox is not among the methods"),
        ({"fedala.eta": "1,0"}, r"fedala\.eta must be greater than 0"),
        ({"fedala.wrong": "1,2"}, r"There is no option fedala\.wrong"),
        ({"lr": ",".join(map(str, range(1, 1200)))}, "1199 points, and the most is 1000"),
        ({"fedala.layers": "1,conv[12]"}, "cannot have"),
        (3, "sweep must be a table"),
    ],
)
def test_sweeps_that_are_refused(sweep, says):
    with pytest.raises(UserError, match=says):
        planned(sweep=sweep)


def test_an_option_cannot_be_set_and_swept():
    with pytest.raises(UserError, match="both set and swept"):
        planned(set={"fedala.eta": 1}, sweep={"fedala.eta": "1,2"})


# --- what runs side by side ----------------------------------------------------------------------


def test_points_that_differ_in_numbers_run_side_by_side():
    sweep = {"lr": "0.1,0.2", "momentum": "0,0.9", "weight_decay": "0,0.1", "clip": "1,2"}
    assert [len(group) for group in groups_of(method="fedavg", sweep=sweep)] == [16]


def test_points_that_differ_in_steps_run_one_after_another():
    sweep = {"lr": "0.1,0.2", "batch_size": "4,8"}
    assert [len(group) for group in groups_of(method="fedavg", sweep=sweep)] == [2, 2]
    sweep = {"optimizer": "sgd,adam", "lr": "0.1,0.2"}
    assert [len(group) for group in groups_of(method="fedavg", sweep=sweep)] == [2, 2]
    sweep = {"ditto.epochs": "1,2", "ditto.lam": "0.1,0.2"}
    assert [len(group) for group in groups_of(method="ditto", sweep=sweep)] == [2, 2]


NUMBERS = {
    "fedprox": {"fedprox.mu": "0.1,1"},
    "ditto": {"ditto.lam": "0.1,1"},
    "pfedme": {"pfedme.personal_lr": "0.01,0.05", "pfedme.lam": "5,15", "pfedme.beta": "1,0.5"},
    "per-fedavg": {"per-fedavg.alpha": "0.1,0.05", "per-fedavg.beta": "0.1,0.02"},
    "fedphp": {"fedphp.mu": "0.9,0.5", "fedphp.lam": "0.01,0.3"},
    "fedamp": {"fedamp.alpha": "1000,10", "fedamp.lam": "1,2", "fedamp.sigma": "0.1,10"},
    "partialfed": {"partialfed.tau": "5,2", "partialfed.decay": "0.965,0.5"},
    "fedfomo": {"fedfomo.share": "0.2,0.5"},
    "fedpac": {"fedpac.lam": "0.1,1"},
    "ifca": {"ifca.noise": "0,0.1"},
    "apple": {"apple.eta": "0.01,0.1", "apple.mu": "0.1,1"},
    "fedala": {"fedala.eta": "1,0.1"},
    "fedprox-c": {"fedprox-c.mu": "0.1,1"},
    "scaffold": {"scaffold.eta_g": "1,0.5"},
    "feddyn": {"feddyn.alpha": "0.1,1"},
    "moon": {"moon.mu": "1,10", "moon.tau": "0.5,0.1"},
    "ditto+ala": {"ditto.lam": "0.1,1", "ala.eta": "1,0.1"},
}


#: Settings that make a method quick, or let two rounds show what its numbers do.
SETTINGS = {
    "fedavg-c": {"fedavg-c.epochs": 2},
    "fedprox-c": {"fedprox-c.epochs": 2},
    "partialfed": {"partialfed.f_m": 1, "partialfed.f_s": 1},
}


@pytest.mark.parametrize("method", EACH_KIND)
def test_each_point_equals_the_run_alone(method, tmp_path):
    """All lanes at once, in float64, two seeds: history and models of every point."""
    sweep = {"lr": "0.1,0.02", **NUMBERS.get(method, {})}
    if method == "per-fedavg":
        del sweep["lr"]  # α and β take its place
    options = {
        "rounds": 2,
        "seeds": 2,
        "lanes": "all",
        "precision": "float64",
        "set": SETTINGS.get(method, {}),
    }
    checked = planned(method, **options, sweep=sweep)
    assert len(checked.groups) == 1
    together = execute(checked, None)
    labels = list(together.methods)
    for label in (labels[0], labels[-1]):
        point = split_label(label)[1]
        own = config_at(checked.config, method, point)
        values = {k: getattr(own, k) for k in (*options, "lr", "method", "batch_size", "device")}
        values["set"] = own.set
        alone = run(dataset=federation(), model=Net, **values).methods[make(method).name]
        for row, expected in zip(together.methods[label].history, alone.history, strict=True):
            assert row.score == pytest.approx(expected.score, abs=1e-10)
            assert row.loss == pytest.approx(expected.loss, abs=1e-10)
        for key, model in alone.models.items():
            for name, value in model.items():
                found = together.methods[label].models[key][name]
                assert (found.double() - value.double()).abs().max() < 1e-9, (key, name)
    losses = {result.history[-1].loss for result in together.methods.values()}
    # Two temperatures of PartialFed may lead to the same choices.
    assert len(losses) >= len(labels) - (method == "partialfed"), "points should differ"


def test_server_optimizers_are_swept_as_lanes():
    options = {"method": "fedavg", "server_optimizer": "adam"}
    assert [len(g) for g in groups_of(**options, sweep={"server_lr": "0.1,0.01"})] == [2]


SWEEP = {"sweep": {"lr": "0.1,0.02,0.004"}, "momentum": 0.9, "keep_optimizer": True}


def test_a_sweep_that_is_stopped_and_resumed_equals_one_that_is_not(tmp_path):
    execute(planned(**SWEEP), tmp_path / "whole")
    with pytest.raises(Stopped):
        execute(planned(**SWEEP), tmp_path / "parts", observer=stop_after(2))
    assert 0 < len(rows_of(tmp_path / "parts")) < len(rows_of(tmp_path / "whole"))
    execute(planned(**SWEEP), tmp_path / "parts", resume=True)
    same(tmp_path / "whole", tmp_path / "parts")
    models = RunFolder(tmp_path / "parts").model("fedala[lr=0.02]", 0, 3)
    assert models.keys() == Net().state_dict().keys()


def test_a_finished_sweep_gets_more_rounds_and_seeds(tmp_path):
    whole = {**SWEEP, "rounds": 3, "seeds": 2, "save_best": False}
    execute(planned("fedavg", **whole), tmp_path / "whole")
    execute(planned("fedavg", **{**whole, "rounds": 2}), tmp_path / "rounds")
    execute(planned("fedavg", **whole), tmp_path / "rounds", resume=True)
    same(tmp_path / "whole", tmp_path / "rounds")
    execute(planned("fedavg", **{**whole, "seeds": 1}), tmp_path / "seeds")
    execute(planned("fedavg", **whole), tmp_path / "seeds", resume=True)

    def key(row):
        return row["method"], row["seed"], row["round"]

    found, expected = (sorted(rows_of(tmp_path / n), key=key) for n in ("seeds", "whole"))
    assert found == expected


# --- the winner ----------------------------------------------------------------------------------


def made_up(label, validation, test, losses=None):
    """A method of one run whose evaluations have these scores, and losses on validation samples."""
    history = [
        HistoryRow(0, round, score, 1.0, score, score_validation=held_out, loss_validation=loss)
        for round, (held_out, score, loss) in enumerate(
            zip(validation, test, losses or [None] * len(test), strict=True)
        )
    ]
    return MethodResult(label, label, history)


def test_validation_picks_the_point_and_the_round_and_the_test_score_is_of_that_choice():
    """Point b has the best test score, but a is better on the samples that are held out."""
    results = {
        "m[lr=1]": made_up("m[lr=1]", [0.2, 0.9], [0.5, 0.4]),
        "m[lr=2]": made_up("m[lr=2]", [0.8, 0.7], [0.3, 0.99]),
        "m[lr=3]": made_up("m[lr=3]", [0.1, 0.1], [0.6, 0.6]),
    }
    [sweep] = find_sweeps({"lr": "1,2,3"}, results)
    assert sweep.winner == "m[lr=1]"
    assert sweep.test_score(sweep.winner)["mean"] == 0.4
    assert sweep.edges() == ["lr=1 is the smallest"]
    sentences = describe_sweep(sweep)
    assert "picked by validation samples: test accuracy 40.00 %" in sentences[0]
    assert "edge of the grid (lr=1 is the smallest)" in sentences[1]


def test_a_loss_picks_the_point_and_the_round_if_it_is_asked_for():
    results = {
        "m[lr=1]": made_up("m[lr=1]", [0.2, 0.9], [0.5, 0.4], [0.7, 0.6]),
        "m[lr=2]": made_up("m[lr=2]", [0.8, 0.7], [0.3, 0.99], [0.5, 0.9]),
    }
    [sweep] = find_sweeps({"lr": "1,2"}, results)
    assert sweep.winner == "m[lr=2]"
    assert sweep.test_score(sweep.winner)["mean"] == 0.3
    assert [sweep.format_criterion(label) for label in results] == ["0.6", "0.5"]
    summary = sweep.summary()
    assert (summary["picked_by"], summary["criterion"]) == ("loss_validation", 0.5)
    assert find_leaders([*results.values()])[1] == [results["m[lr=2]"]]


def test_the_headline_takes_the_point_that_the_sweep_takes():
    results = [
        made_up("m[lr=1]", [0.9], [0.4]),
        made_up("m[lr=2]", [0.8], [0.99]),
        made_up("n", [0.1], [0.3]),
    ]
    assert find_leaders(results) == ("validation_picked", [results[0]])
    tied = [*results[:2], made_up("n", [0.1], [0.4])]
    assert find_leaders(tied)[1] == [tied[0], tied[2]]


def test_points_that_are_equal_are_named():
    results = {f"m[lr={k}]": made_up(f"m[lr={k}]", [0.5], [k / 10]) for k in (1, 2, 3)}
    [sweep] = find_sweeps({"lr": "1,2,3"}, results)
    assert "Equal on these samples: m[lr=2], m[lr=3]." in describe_sweep(sweep)[1]


def test_without_validation_the_choice_is_called_optimistic():
    results = {
        f"m[lr={k}]": made_up(f"m[lr={k}]", [None, None], scores)
        for k, scores in enumerate(([0.1, 0.2], [0.9, 0.3], [0.5, 0.5]))
    }
    [sweep] = find_sweeps({"lr": "0,1,2"}, results)
    assert (sweep.winner, sweep.edges()) == ("m[lr=1]", [])
    [sentence] = describe_sweep(sweep)
    assert "test samples, which is optimistic" in sentence


def test_no_point_that_is_a_number():
    nan = float("nan")
    results = {f"m[lr={k}]": made_up(f"m[lr={k}]", [nan], [nan]) for k in (1, 2)}
    [sweep] = find_sweeps({"lr": "1,2"}, results)
    assert sweep.winner == "m[lr=1]"


def test_the_summary_and_the_page_have_the_grid(tmp_path):
    options = {"sweep": {"lr": "0.1,0.02", "fedala.eta": "1,0.1"}, "rounds": 1}
    execute(planned(**options), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["sweep"]["fedala"]["winner"] in summary["methods"]
    text = page.write([tmp_path / "run"]).read_text()
    assert "lr = 0.02" in text
    assert "fedala.eta = 0.1" in text
    assert "is the best of 4 points" in text
    assert "FedALA: test accuracy" in text
    assert "(of each sweep, the point that its test samples pick)" in text
    assert "unfinished" not in text
    assert "has not begun" not in text


def test_a_swept_option_leaves_what_depends_on_it_to_each_point():
    config = planned("fedavg", sweep={"server_optimizer": "avgm,adam"}, server_optimizer="adam")
    assert [member.method.optimizer.lr for member in config.members] == [1.0, 0.01]
    config = planned("fedavg", sweep={"schedule": "step,cosine"}, schedule="step", rounds=6)
    assert [member.config.decay_every for member in config.members] == [None, None]


@pytest.mark.parametrize("schedule", ["cosine", "step"])
def test_a_sweep_whose_schedules_plan_ahead_gets_no_more_rounds(schedule, tmp_path):
    options = {"sweep": {"schedule": f"constant,{schedule}"}}
    execute(planned("fedavg", rounds=3, **options), tmp_path / "run")
    with pytest.raises(UserError, match=f"The {schedule} schedule plans its rounds ahead"):
        execute(planned("fedavg", rounds=6, **options), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"beta2": 0.9}, "beta2 has no effect without the optimizer adam or adamw"),
        ({"decay": 0.5}, "decay has no effect without the schedule step or exponential"),
        ({"keep_optimizer": True}, "keep_optimizer has no effect on sgd without momentum"),
        ({"trials": 5, "sweep": {"lr": "0.1,0.2"}}, "trials has no effect without a random range"),
        ({"sweep": {"schedule": "constant,step", "decay": "0.5,0.1"}}, "decay has no effect"),
        ({"sweep": {"lr": "0.1,1e-1"}}, "give different values"),
        ({"optimizer": "adam", "momentum": 1}, "momentum must be less than 1 for adam"),
    ],
)
def test_options_without_effect_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        planned("fedavg", **options)


def test_an_option_may_be_for_some_points_of_a_sweep():
    schedules = planned("fedavg", sweep={"schedule": "constant,step"}, decay=0.5)
    assert [member.config.recipe().schedule.decay for member in schedules.members] == [0.5, 0.5]
    servers = planned("fedavg", sweep={"server_optimizer": "none,adam"}, server_lr=0.1)
    assert servers.members[1].method.optimizer.lr == 0.1


@pytest.mark.parametrize("method", ["fedavg", "fedphp"])
@pytest.mark.parametrize("policy", ["skip", "reset"])
def test_a_point_that_diverges_leaves_the_others_alone(method, policy):
    options = {"rounds": 3, "lanes": "1", "on_divergence": policy}
    swept = execute(planned(method, sweep={"lr": "1e9,0.1"}, **options), None).methods
    alone = execute(planned(method, lr=0.1, **options), None).methods[method]
    assert sum(row.diverged for row in swept[f"{method}[lr=1e9]"].history) > 0
    cells = [
        [{**row.columns(), "seconds": 0} for row in result.history]
        for result in (swept[f"{method}[lr=0.1]"], alone)
    ]
    assert cells[0] == cells[1]
