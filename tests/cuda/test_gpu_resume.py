"""On a GPU, too, a resumed run equals the uninterrupted one to the bit."""

import pytest
from runs.test_resume import interrupted, planned, same
from small import EACH_KIND

from fedala.runs.execute import execute

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", EACH_KIND)
def test_resumed_is_uninterrupted(method, tmp_path):
    options = {"device": "cuda", "seeds": 2}
    execute(planned(method, **options), tmp_path / "whole")
    interrupted(tmp_path / "parts", 2, method, **options)
    same(tmp_path / "whole", tmp_path / "parts")
