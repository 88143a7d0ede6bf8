"""The config: what is written can be read, what cannot be meant is refused."""

import tomllib
import typing
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedala.errors import UserError
from fedala.runs.config import Config

TEXT = st.text(st.characters(codec="utf-8"))
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


def values_of(field, kind):
    """Anything that the field accepts, by its own type and limits."""
    if field.name == "set":
        return st.dictionaries(TEXT, TEXT | NUMBERS | st.integers() | st.booleans(), max_size=3)
    if field.name == "sweep":
        values = st.lists(NUMBERS, min_size=1, max_size=3)
        return st.dictionaries(st.sampled_from(["lr", "fedprox.mu"]), values)
    if field.name == "lanes":
        return st.sampled_from(["auto", "all"]) | st.integers(1, 999).map(str)
    if field.name == "device":
        return st.sampled_from(["auto", "cpu", "cuda"]) | st.integers(0, 99).map("cuda:{}".format)
    if field.name == "method":
        return st.lists(
            st.sampled_from(["fedala", "fedavg", "ditto+ala"]), min_size=1, unique=True
        ).map(",".join)
    limits = field.metadata
    arms = typing.get_args(kind) or (kind,)
    if limits["choices"]:
        return st.sampled_from(limits["choices"])
    if int in arms:
        return st.integers(limits["least"], limits["most"] or 2**63 - 1)
    if float in arms:
        least = limits["least"] if limits["above"] is None else limits["above"]
        return st.floats(
            least,
            limits["most"] or 2**126,
            exclude_min=limits["above"] is not None,
            allow_nan=False,
            allow_infinity=False,
        )
    return st.booleans() if bool in arms else NAMES


KINDS = typing.get_type_hints(Config)
VALUES = st.fixed_dictionaries(
    {}, optional={f.name: values_of(f, KINDS[f.name]) for f in fields(Config)}
)


@settings(deadline=None, max_examples=200)
@given(VALUES)
def test_what_is_written_can_be_read(values):
    config = Config.from_values(values)
    assert Config.from_values(tomllib.loads(config.text())) == config


def test_hyperparameters_are_the_same_in_tables_and_in_full(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('[set]\n"fedavg.x" = 1\n[set.fedala]\neta = 0.5\n')
    assert Config.read(file) == {"set": {"fedavg.x": 1, "fedala.eta": 0.5}}
    assert Config.from_values(Config.read(file)).set == {"fedavg.x": 1, "fedala.eta": 0.5}


def test_methods_are_split_and_spelled_in_one_way():
    assert Config.from_values({"method": " FedALA, ditto+ala ,"}).methods == ("fedala", "ditto+ala")


def test_lanes_may_be_a_number_in_a_file():
    assert Config.from_values({"lanes": 4}).lanes == "4"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"method": ","}, "method must name different methods"),
        ({"method": "fedavg,fedavg"}, "method must name different methods"),
        ({"lanes": "0"}, "lanes must be auto, all or a number from 1 on"),
        ({"lanes": "-1"}, "lanes must be"),
        ({"set": "fedala.eta=1"}, "set must be a table"),
        (
            {"set": {"fedala": {"eta": [1]}}},
            r"set fedala\.eta must be a number, text, true or false",
        ),
        ({"set": {"fedala.eta": float("nan")}}, r"set fedala\.eta must be"),
        ({"lr": "inf"}, "lr must be a number"),
        ({"client": 3}, r"There is no option client \(did you mean clients\?\)"),
    ],
)
def test_refusals(values, says):
    with pytest.raises(UserError, match=says) as caught:
        Config.from_values(values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"rounds = = 3", "is not TOML"),
        (b"\xff\xfe", "cannot be read"),
        (b"rouns = 3", r"unknown option rouns \(did you mean rounds\?\)"),
        (b"set = 3", "set must be a table"),
    ],
)
def test_files_that_are_refused(tmp_path, content, says):
    (tmp_path / "my.toml").write_bytes(content)
    with pytest.raises(UserError, match=says):
        Config.read(tmp_path / "my.toml")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        Config.read(tmp_path / "my.toml")
