"""Any damaged input gives a result, or one sentence and exit code 2, in little time and memory."""

import random

import pytest
from fuzz.bounded import attempt
from fuzz.campaign import case
from fuzz.targets import targets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("name", targets())
def test_what_is_sound_is_read(name, tmp_path):
    """Otherwise the damaged ones would prove nothing."""
    (tmp_path / "here").mkdir()
    target = targets()[name]
    target.write(tmp_path / "here")
    outcome = attempt(list(target.arguments), tmp_path / "here", before=target.before)
    assert (outcome.code, outcome.fault) == (0, ""), outcome.says


@pytest.mark.parametrize("name", targets())
@settings(max_examples=4, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_what_is_damaged_is_a_sentence(name, seed):
    outcome = case(targets()[name], random.Random(seed))
    assert not outcome.fault, outcome.says
