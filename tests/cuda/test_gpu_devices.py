"""A run on one of several GPUs has the same bits as on the current one, which stays current."""

import pytest
import torch
from runs.test_resume import planned, same
from small import EACH_KIND

from fedala.runs.execute import execute

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", ["fedala", "ditto+ala"])
def test_a_numbered_device_is_the_device(method, tmp_path):
    execute(planned(method, device="cuda"), tmp_path / "plain")
    execute(planned(method, device="cuda:0"), tmp_path / "numbered")
    same(tmp_path / "plain", tmp_path / "numbered")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("method", EACH_KIND)
def test_the_second_gpu(method, precision, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, and there is {torch.cuda.device_count()}")
    execute(planned(method, device="cuda:0", precision=precision), tmp_path / "first")
    used = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    execute(planned(method, device="cuda:1", precision=precision), tmp_path / "second")
    assert torch.cuda.max_memory_allocated(0) == used, "the run on cuda:1 has used cuda:0"
    assert torch.cuda.current_device() == 0
    same(tmp_path / "first", tmp_path / "second")


def test_a_run_continues_on_the_other_gpu(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, and there is {torch.cuda.device_count()}")
    execute(planned(device="cuda:1"), tmp_path / "whole")
    execute(planned(device="cuda:0", rounds=2), tmp_path / "moved")
    execute(planned(device="cuda:1"), tmp_path / "moved", resume=True)
    same(tmp_path / "whole", tmp_path / "moved")
