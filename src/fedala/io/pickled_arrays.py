"""Read arrays out of a pickle without unpickling it.

Python's own unpickler calls whatever functions a pickle names. This reader calls none: it follows
the few instructions with which NumPy writes arrays, scalars and plain containers, builds the arrays
from their bytes itself, and refuses a pickle that contains anything else.
"""

import math
import pickletools
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fedala.errors import UserError, first_line
from fedala.io.untrusted import check_expansion, check_memory

Array = np.ndarray[Any, Any]

#: The names that a pickle of arrays contains, and what each of them means here.
_NAMES = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    **{
        (f"numpy.{core}.{module}", name): name
        for core in ("core", "_core")  # NumPy 1 and 2
        for module, name in (
            ("multiarray", "_reconstruct"),
            ("multiarray", "scalar"),
            ("numeric", "_frombuffer"),
        )
    },
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
#: Instructions that push their argument: numbers, text and bytes.
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
_IGNORED = {"PROTO", "FRAME"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
#: Bytes of memory that an instruction may take besides its argument.
_COST_OF_NUMBER, _COST = 40, 100
_CHECK_EVERY = 2**16
_MOST_DIMENSIONS = 32
_LONGEST_SCALAR = 1024  # bytes


class _Name(NamedTuple):
    """A function or class that the pickle names. It stays a name."""

    role: str


class PickledArray:
    """An array of a pickle: numbers or texts, or a list of objects in C order."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.numbers: Array | None = None
        self.objects: list[Any] | None = None


class _Dtype:
    """The type of an array, before and after its state is known."""

    def __init__(self, text: str) -> None:
        self.text, self.order = text, "|"

    def resolve(self) -> "np.dtype[Any]":
        order = "" if self.order == "|" else self.order
        return np.dtype(order + self.text)


def read_pickled_arrays(data: bytes, stored: int, where: str) -> Any:
    """Return the content of a pickle: containers, numbers, texts and `PickledArray`s.

    `stored` is the number of bytes that the pickle takes in its file. `where` is for messages.
    """
    try:
        return _Reader(stored, where).read(data)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # damaged bytes can raise almost any kind of error
        raise UserError(f"{where} is not a readable pickle ({first_line(error)}).") from None


class _Reader:
    def __init__(self, stored: int, where: str) -> None:
        self.stored, self.where = stored, where
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.cost = 0
        self.steps: dict[str, Callable[[Any], None]] = {
            "GLOBAL": lambda arg: self._push_name(*str(arg).split(" ", 1)),
            "STACK_GLOBAL": lambda arg: self._push_name(*self._take(2)),
            "MARK": lambda arg: self.marks.append(len(self.stack)),
            "TUPLE": lambda arg: self.stack.append(tuple(self._take_marked())),
            "EMPTY_LIST": lambda arg: self.stack.append([]),
            "EMPTY_DICT": lambda arg: self.stack.append({}),
            "APPEND": lambda arg: self._extend(self._take(1)),
            "APPENDS": lambda arg: self._extend(self._take_marked()),
            "SETITEM": lambda arg: self._update(self._take(2)),
            "SETITEMS": lambda arg: self._update(self._take_marked()),
            "MEMOIZE": lambda arg: self._remember(len(self.memo)),
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "BINGET": lambda arg: self.stack.append(self.memo[arg]),
            "LONG_BINGET": lambda arg: self.stack.append(self.memo[arg]),
            "REDUCE": lambda arg: self._call(*self._take(2)),
            "BUILD": lambda arg: self._set_state(*self._take(2)),
        }

    def read(self, data: bytes) -> Any:
        """Follow all instructions; return what is left at the end."""
        for count, (code, argument, _) in enumerate(pickletools.genops(data)):
            name = code.name
            if name in _LITERALS:
                if isinstance(argument, bytearray):
                    argument = bytes(argument)
                self.stack.append(argument)
                self.cost += _COST_OF_NUMBER
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
                self.cost += _COST_OF_NUMBER
            elif name in _TUPLES:
                self.stack.append(tuple(self._take(_TUPLES[name])))
                self.cost += _COST
            elif name in self.steps:
                self.steps[name](argument)
                self.cost += _COST
            elif name == "STOP":
                [result] = self.stack
                return result
            elif name not in _IGNORED:
                self._refuse(f"the instruction {name}")
            if count % _CHECK_EVERY == 0:
                advice = "it is not what PFLlib writes"
                check_expansion(self.cost, self.stored, self.where, advice)
                check_memory(self.cost, self.where)
        raise ValueError("it has no end")

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"{self.where} holds a pickle with {what}; only arrays of numbers and texts, lists and "
            "dicts are read, because anything else could run a program."
        )

    def _take(self, count: int) -> list[Any]:
        """Take values from the stack, but none from below the last mark."""
        floor = self.marks[-1] if self.marks else 0
        if len(self.stack) - count < floor:
            raise ValueError("its stack is empty")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def _take_marked(self) -> list[Any]:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def _top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise ValueError(f"it adds to something that is not a {kind.__name__}")
        return self.stack[-1]

    def _extend(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def _update(self, values: list[Any]) -> None:
        target = self._top(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) is not str:
                self._refuse("a dict whose keys are not texts")
            target[key] = value

    def _remember(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def _push_name(self, module: Any, name: Any) -> None:
        # What is not text is never shown: a nested list may be endless once it is written out.
        if not type(module) is type(name) is str:
            self._refuse("a name that is not text")
        role = _NAMES.get((module, name))
        if role is None:
            self._refuse(f"{module[:100]}.{name[:100]}")
        self.stack.append(_Name(role))

    def _call(self, function: Any, arguments: Any) -> None:
        """Do what a function of NumPy would do, if it is one of those that make arrays."""
        role = function.role if isinstance(function, _Name) else None
        match role, arguments:
            case "_reconstruct", (_Name("ndarray"), tuple(), bytes()):
                self.stack.append(PickledArray())
            case "dtype", (str() as text, *_):
                if not re.fullmatch(r"[biuf][1248]|U[0-9]{1,5}|O8?", text):
                    self._refuse(f"an array of the type {text[:50]}")
                self.stack.append(_Dtype(text))
            case "scalar", (_Dtype() as kind, bytes() as content):
                dtype = self._resolve(kind)
                # Content can be named again and again, and each time a text is made of it.
                if len(content) > _LONGEST_SCALAR:
                    self._refuse(f"a single text of {len(content)} bytes")
                self.cost += len(content)
                if len(content) != dtype.itemsize:
                    raise ValueError("it has a number of the wrong length")
                self.stack.append(np.frombuffer(content, dtype)[0].item())
            case "_frombuffer", (bytes() as content, _Dtype() as kind, tuple() as shape, order):
                array = PickledArray()
                self._fill(array, shape, kind, order == "F", content)
                self.stack.append(array)
            case _:
                self._refuse(f"a call of {role or type(function).__name__} that makes no array")

    def _set_state(self, target: Any, state: Any) -> None:
        match target, state:
            case PickledArray(), (int(), tuple() as shape, _Dtype() as kind, bool() as order, data):
                self._fill(target, shape, kind, order, data)
            case _Dtype(), (int(), ("<" | ">" | "|" | "=") as order, None, None, None, *_):
                target.order = order
            case _:
                self._refuse(f"a state of {type(target).__name__.strip('_')} that is not plain")
        self.stack.append(target)

    def _resolve(self, kind: _Dtype) -> "np.dtype[Any]":
        if kind.text.startswith("O"):
            self._refuse("an object in the place of numbers")
        return kind.resolve()

    def _fill(
        self, array: PickledArray, shape: tuple[Any, ...], kind: _Dtype, fortran: bool, data: Any
    ) -> None:
        """Give an array its content, if that has the length that its shape asks for."""
        if len(shape) > _MOST_DIMENSIONS or not all(
            type(length) is int and 0 <= length < 2**40 for length in shape
        ):
            raise ValueError("it has an array with a shape that is not one")
        size = math.prod(shape)
        if isinstance(data, list) and kind.text.startswith("O"):
            if len(data) != size:
                raise ValueError(f"it has {len(data)} objects for the shape {shape}")
            array.shape, array.objects = shape, data
            return
        dtype = self._resolve(kind)
        if not isinstance(data, bytes) or len(data) != size * dtype.itemsize or not dtype.itemsize:
            raise ValueError(f"its bytes do not fit the shape {shape}")
        numbers = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
        array.shape, array.numbers = shape, numbers
