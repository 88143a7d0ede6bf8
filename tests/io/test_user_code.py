"""Code that a user names: what is executed, under which name, and one sentence for a mistake."""

import importlib
import sys

import pytest

from fedala.errors import UserError
from fedala.io.files import sha256
from fedala.io.user_code import digest_code, is_reference, load_code, load_function, module_of


def test_a_file_is_executed_once_and_has_its_own_name(own_code):
    (own_code / "mine.py").write_text("import helper\nloads = helper.count()\n")
    (own_code / "helper.py").write_text(
        "calls = []\ndef count():\n    calls.append(1)\n    return len(calls)\n"
    )
    module = load_code("mine.py")
    assert (module.__name__, module.loads) == ("mine", 1)
    assert load_code(str(own_code / "mine.py")) is module
    assert importlib.import_module("mine") is module
    assert sys.modules["helper"].calls == [1]
    assert not (own_code / "__pycache__").exists()


def test_a_file_that_has_changed_is_executed_again(own_code):
    """Its digest is that of the source that was executed, not of the file as it is by now."""
    file = own_code / "mine.py"
    file.write_text("x = 1\n")
    assert load_code("mine.py").x == 1
    file.write_text("x = 2\n")  # of the same length, in the same second
    assert digest_code("mine") == sha256(b"x = 1\n")
    assert load_code("mine.py").x == 2
    assert digest_code("mine") == sha256(b"x = 2\n")


def test_a_module_of_this_folder_or_of_a_package_can_be_named(own_code):
    (own_code / "package").mkdir()
    (own_code / "package" / "__init__.py").write_text("")
    (own_code / "package" / "inner.py").write_text("x = 3\n")
    assert load_code("package.inner").x == 3
    assert digest_code("package.inner") == sha256(b"x = 3\n")
    before = digest_code("package")
    (own_code / "package" / "inner.py").write_text("x = 4\n")
    assert digest_code("package") != before  # all of its files count
    assert sys.path[-1] == str(own_code)  # installed packages come first


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1\ny = nothing\n", "line 2: NameError: name 'nothing' is not defined."),
        ("def f(:\n", "line 1: SyntaxError: "),
        ("import json\n\njson.loads('{')\n", "line 3: JSONDecodeError: Expecting property"),
        ("from . import other\n", "line 1: ImportError: attempted relative import"),
        ("import no_such_module\n", "line 1: ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit('bye')\n", "line 2: SystemExit: bye."),
        ("raise ValueError\n", "line 1: ValueError."),
        ("\x00", "null bytes"),
    ],
)
def test_an_error_is_one_sentence_with_its_line(own_code, source, says):
    (own_code / "mine.py").write_text(source)
    with pytest.raises(UserError, match=r"mine\.py cannot be imported: ") as error:
        load_code("mine.py")
    assert says in str(error.value)
    assert "mine" not in sys.modules


def test_a_file_must_not_have_the_name_of_another_module(own_code):
    (own_code / "wave.py").write_text("")  # a module of Python that nothing has imported
    (own_code / "json.py").write_text("")
    (own_code / "other").mkdir()
    for folder in (own_code, own_code / "other"):
        (folder / "twice.py").write_text("")
    load_code("twice.py")
    for name in ("wave.py", "json.py", "other/twice.py"):
        with pytest.raises(UserError, match=r"name of another module, \w+ \(/"):
            load_code(name)


def test_functions_are_named_after_a_colon(own_code):
    (own_code / "net.py").write_text("def make(): return 5\nx = 1\n")
    assert load_function("net.py:make")() == load_function("net:make")() == 5
    assert module_of("some/net.py:make") == module_of("net:make") == "net"
    for text in ("net.py:make", "a/b.py:f", "package.net:Net", "net.py", "C:\\net.py:f"):
        assert is_reference(text), text
    for text in ("cnn", "resnet18", "own", "mlp:64", None):
        assert not is_reference(text), text
    for text, says in (
        ("net.py:x", "x is not a function"),
        ("net.py:y", "y does not exist in net.py"),
        ("net.py", "lacks a function"),
    ):
        with pytest.raises(UserError, match=says):
            load_function(text)
