"""The kernels, compiled for a GPU that is not here. Another process does it, as tests interpret."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from fedala.cuda.compiling import drop_memory
from fedala.cuda.late import find_place
from fedala.io.child_processes import count_cores

#: A GeForce RTX 40. Of all GPUs that have kernels, its generation and the one before have the least
#: shared memory for a block.
CAPABILITY, MOST_SHARED = 89, 99 * 1024


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    program = Path(__file__).with_name("compilation.py")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, program, str(CAPABILITY)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_block_fits_into_the_shared_memory(compiled):
    """But that of ALA with many classes: if it does not, ALA learns in batches."""
    assert compiled["shared"].pop("_learn") > 0
    assert not {name: size for name, size in compiled["shared"].items() if size > MOST_SHARED}


def test_a_rehearsed_step_leaves_nothing_to_compile(compiled):
    """With any number of lanes; and several threads have compiled, if there are several cores."""
    assert compiled["late"] == []
    assert compiled["twice"] == []
    assert compiled["together"] > 1 or count_cores() == 1


def test_tensors_without_memory_lie_as_those_with_it():
    tensors = {
        "model": {"weight": torch.zeros(3, 5, 4).transpose(1, 2), "bias": torch.zeros(3, 5)},
        "order": torch.zeros(3, 7, dtype=torch.int64)[:, 1:],
        "lr": torch.zeros(1).expand(3),
        "epochs": 2,
    }
    dropped = drop_memory(tensors)
    assert dropped["epochs"] == 2
    places = set()
    for own, other in (
        *zip(tensors["model"].values(), dropped["model"].values(), strict=True),
        *((tensors[name], dropped[name]) for name in ("order", "lr")),
    ):
        assert other.is_meta
        assert (other.shape, other.stride(), other.dtype) == (own.shape, own.stride(), own.dtype)
        assert other.data_ptr() % 16 == 0
        places.add(find_place(other)[0])
    assert len(places) == 4
