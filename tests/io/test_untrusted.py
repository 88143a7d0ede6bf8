"""Files from elsewhere are read through `fedala.io.untrusted` alone, and it keeps its promises."""

import ast
import os
import threading
from pathlib import Path

import pytest

from fedala.errors import UserError
from fedala.io import untrusted

SOURCE = Path(__file__).parents[2] / "src" / "fedala"

#: Calls that open a file by its name, or that give the name to a library which does.
OPENS = {
    "open", "read_text", "read_bytes", "fromfile", "memmap", "loadtxt", "genfromtxt", "load_file",
    "safe_open", "ZipFile", "GzipFile", "ParquetFile", "read_table", "scandir",
}  # fmt: skip
#: Modules that may call them all the same, and why.
ALLOWED = {
    "io/untrusted.py": "it checks what it opens",
    "io/files.py": "it writes files, reads them by their checksum, and those of the package",
    "runs/tables.py": "appends to the tables of a run folder, and reads with `require_file`",
    "report/loggers.py": "writes and reads a logger's id in the run folder",
    "flower/": "logs of processes that it has started itself",
}
#: Objects that are open already, and files of this package.
HARMLESS = {
    "archive.open(info)", "archive.open(member.info)", "zipfile.ZipFile(file)",
    "gzip.GzipFile(fileobj=file)", "np.loadtxt(text, dtype=np.float32, ndmin=2, comments=None)",
    "ParquetFile(data)", "pillow.open(data, formats=FORMATS)",
    "os.open(os.devnull, os.O_WRONLY)",
    "(own if own.is_file() else shared).read_text(encoding='utf-8')",
}  # fmt: skip


def find_opening_calls(path):
    """Yield the calls in a source file that open something by its name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            text = ast.unparse(node)
            is_run_folder = text.startswith("RunFolder.open(")
            if called in OPENS and text not in HARMLESS and not is_run_folder:
                yield f"line {node.lineno}: {text}"


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE))
)
def test_files_are_opened_through_untrusted_alone(path):
    name = path.relative_to(SOURCE).as_posix()
    found = list(find_opening_calls(path))
    assert not found or name.startswith(tuple(ALLOWED)), found


def test_the_test_above_finds_what_it_looks_for():
    assert list(find_opening_calls(SOURCE / "io/untrusted.py"))
    assert list(find_opening_calls(SOURCE / "io/files.py"))


@pytest.mark.parametrize(
    "read",
    [
        untrusted.open_file,
        lambda path: untrusted.read_file(path, 9),
        lambda path: untrusted.read_json(path, 9),
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to a device"])
def test_only_a_file_is_opened(tmp_path, kind, read):
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is not a file"):
        read(path)


def test_a_pipe_that_appears_after_the_check_does_not_block(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "x")
    monkeypatch.setattr(untrusted, "require_file", lambda path: path)
    refused = []

    def attempt():
        with pytest.raises(UserError, match="is not a file"):
            untrusted.open_file(tmp_path / "x")
        refused.append(True)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(10)
    assert refused


def test_a_file_is_read_up_to_its_bound(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert untrusted.read_file(tmp_path / "x", 5) == b"12345"
    with pytest.raises(UserError, match="larger than 4 bytes"):
        untrusted.read_file(tmp_path / "x", 4)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ('{"a": [1.5, null, "é\\u00e9"]}', {"a": [1.5, None, "éé"]}),
        (str(2**63 - 1), 2**63 - 1),
        (str(-(2**63)), -(2**63)),
        ('"\\ud83d\\ude00"', "😀"),
    ],
)
def test_json_is_read(tmp_path, text, value):
    (tmp_path / "x").write_text(text, encoding="utf-8")
    assert untrusted.read_json(tmp_path / "x", 100) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "not readable JSON"),
        (b"\xff", "not readable JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": 1, "a": 1}', "the key 'a' is there twice"),
        (str(2**63).encode(), "more than 64 bits"),
        (b"9" * 5000, "more than 64 bits"),
        (b'"\\ud800"', "not Unicode"),
        (b'{"\\udfff": 1}', "not Unicode"),
        (b"", "not readable JSON"),
    ],
)
def test_ambiguous_json_is_refused(tmp_path, text, says):
    (tmp_path / "x").write_bytes(text)
    with pytest.raises(UserError, match=says):
        untrusted.read_json(tmp_path / "x", 2**20)


@pytest.mark.parametrize(
    ("size", "stored", "is_refused"),
    [
        (2**28, 1, False),
        (2**28 + 1, 1, True),
        (2**30, 2**30 // 100 + 1, False),
        (2**30, 2**30 // 100 - 1, True),
    ],
)
def test_limits_of_what_compressed_data_may_unpack_to(size, stored, is_refused):
    if is_refused:
        with pytest.raises(UserError, match=r"x has .* MiB that unpack to .* GiB\. .*: do y\."):
            untrusted.check_expansion(size, stored, "x", "do y")
    else:
        untrusted.check_expansion(size, stored, "x", "do y")
