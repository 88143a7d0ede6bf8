"""One thread per test process, since they run in parallel. Triton's interpreter without a GPU."""

import os

import pytest
import torch

torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton.runtime import interpreter
    except ModuleNotFoundError:
        pass
    else:
        _patch = interpreter._patch_lang_tensor

        def _patch_lang_tensor(tensor, scope):
            """Take `int` of arrays with one element, which NumPy no longer does."""
            _patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = _patch_lang_tensor


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))
