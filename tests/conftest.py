"""One thread per test process, since they run in parallel. Triton's interpreter without a GPU."""

import gc
import os
import signal
import sys

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
os.environ["FEDALA_CACHE"] = "off"  # tests of the cache name a folder

# Tests send signals, which `nohup` and `&` would have them and their processes ignore.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # `torch.manual_seed` notes the whole stack for each kind of device that may come to be used.
    for devices in (torch.cuda, torch.mtia, torch.xpu):
        devices.manual_seed_all = lambda seed: None
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


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk():
    """Flushing helps only if the power fails, and no test cuts it. Commands in processes flush."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: os.fstat(descriptor) and None)
        yield


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """Work in an empty folder; afterwards, no code that the test imported has ever been there."""
    from fedala.io import user_code
    from fedala.methods import catalogue, registry

    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_code, "_digests", {})
    classes, modules = dict(registry._classes()), set(sys.modules)
    yield folder
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    registry._own_classes().clear()
    registry._own_classes().update(classes)
    catalogue.cache_clear()


def pytest_collection_finish():
    """Leave what was imported out of later collections: of a million objects, each takes a second.

    A round that runs out of memory collects what it held before it is tried again.
    """
    gc.freeze()


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))
