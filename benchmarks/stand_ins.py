"""Stand-ins for packages that other frameworks import and that a machine may not have.

They are used only if the package is missing, and named in the table. Almost all are empty: the
framework imports them for other datasets, loggers or models. These have a function:

- omegaconf: a dict with attributes, for the config
- pynvml: the free memory of the GPU, when FL-bench picks one
- rich.progress: `track`, which is a loop without its bar then
- multiprocess: Python's own multiprocessing, which it is a copy of
- torchvision.transforms: Compose and Normalize, the same arithmetic with fewer checks, which
  FL-bench applies to every sample
"""

import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Config(dict[str, Any]):
    """A dict whose keys are attributes, at every depth."""

    def __init__(self, content: Any = (), **more: Any) -> None:
        super().__init__()
        self.update(content, **more)

    def update(self, content: Any = (), **more: Any) -> None:
        for key, value in dict(content, **more).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        is_plain = isinstance(value, dict) and not isinstance(value, Config)
        super().__setitem__(key, Config(value) if is_plain else value)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    __setattr__ = __setitem__

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __deepcopy__(self, memo: Any) -> "Config":
        return Config(self)


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]

    def __call__(self, sample: Tensor) -> Tensor:
        return sample.sub(self.mean).div_(self.std)


class _AnyAttribute(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Nothing(metaclass=_AnyAttribute):
    """A class that can be inherited from, made with any arguments, and entered by `with`."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(Nothing, name)


class _EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        return importlib.import_module(full) if full in _FILLERS else Nothing


def _fill_nvml(module: ModuleType) -> None:
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByIndex = int
    module.nvmlDeviceGetMemoryInfo = lambda index: SimpleNamespace(
        free=torch.cuda.mem_get_info(index)[0]
    )


def _fill_omegaconf(module: ModuleType) -> None:
    module.DictConfig = Config
    module.ListConfig = list


def _fill_progress(module: ModuleType) -> None:
    module.track = lambda sequence, *_, **__: sequence


def _fill_transforms(module: ModuleType) -> None:
    module.Compose, module.Normalize = Compose, Normalize


_FILLERS = {
    "omegaconf": _fill_omegaconf,
    "omegaconf.dictconfig": _fill_omegaconf,
    "omegaconf.listconfig": _fill_omegaconf,
    "pynvml": _fill_nvml,
    "rich.progress": _fill_progress,
    "torchvision.transforms": _fill_transforms,
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, missing: Iterable[str]) -> None:
        self.missing = tuple(missing)

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if any(name == root or name.startswith(f"{root}.") for root in self.missing):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        _FILLERS.get(module.__name__, lambda _: None)(module)


def stand_in(packages: Iterable[str]) -> list[str]:
    """Make stand-ins for those of the packages that are missing; return their names."""
    missing = [name for name in packages if not is_installed(name)]
    if "multiprocess" in missing:
        sys.modules["multiprocess"] = multiprocessing
    sys.meta_path.insert(0, _Finder(name for name in missing if name != "multiprocess"))
    return missing


def is_installed(name: str) -> bool:
    if name == "torch.utils.tensorboard":  # it is there, and imports a package that may not be
        name = "tensorboard"
    return importlib.util.find_spec(name) is not None
