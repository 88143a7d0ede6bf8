"""The files that a run writes as a whole, and the record that verifies them."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fedala.data.preprocessing import PREPROCESSING
from fedala.io import files
from fedala.io.untrusted import read_file, require_file
from fedala.runs.changed_defaults import name_former_defaults
from fedala.runs.config import Config
from fedala.runs.digests import NAME, Digests, MethodRecord

T = TypeVar("T")

#: The file with the names of the clients, if the data name them.
CLIENTS = "clients.json"

#: Files that a run writes as a whole. `digests.json` has their digests.
WHOLE_FILES = ("config.toml", "split.csv", "resumed.csv", "summary.json", PREPROCESSING, CLIENTS)

LARGEST = 2**28  # bytes of a file that is read as a whole


class RunRecord:
    """The `digests.json` of a run folder, and the whole files that it covers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digests: Digests | None = None
        self.missing: list[str] = []
        """Whole files that the record names and that were not there when somebody asked."""

    @property
    def digests(self) -> Digests | None:
        """The digests of what the run has written; None if there are none to verify with."""
        if self._digests is None:
            self._digests = Digests.read(self.path)
        return self._digests

    def start(self, digests: Digests) -> None:
        """Replace the digests in memory by those of a new run."""
        self._digests = digests

    def digests_to_extend(self) -> Digests:
        """Return the digests to add to. A folder without any gets those of its present files."""
        if self.digests is None:
            present = [name for name in WHOLE_FILES if (self.path / name).is_file()]
            self._digests = Digests(
                {name: [files.sha256(read_file(self.path / name, LARGEST))] for name in present}
            )
        assert self._digests is not None
        return self._digests

    def write(self) -> None:
        files.write_file(self.path / NAME, self.digests_to_extend().pack())

    def find_method(self, method: str) -> MethodRecord | None:
        """Return the record of a method, if there is one."""
        return self.digests.methods.get(method) if self.digests else None

    def method(self, method: str) -> MethodRecord:
        """Return the record of a method, which is added if there is none."""
        return self.digests_to_extend().methods.setdefault(method, MethodRecord())

    def read_again_if_stale(self, read: Callable[[], T]) -> T:
        """Call `read`, and once more if another process has written a new record since."""
        try:
            return read()
        except files.DamagedFile:
            before, self._digests = self._digests, None
            if self.digests == before:
                raise
            return read()

    def read_verified(self, name: str) -> bytes:
        """Return the content of a whole file if its digest is the recorded one."""
        return self.read_again_if_stale(lambda: self._read_verified(name))

    def _read_verified(self, name: str) -> bytes:
        path = self.path / name
        try:
            data = read_file(path, LARGEST)
        except OSError as error:
            raise files.DamagedFile(f"{path} cannot be read: {error.strerror}.") from None
        if self.digests and not self.digests.expects(name, data):
            raise files.DamagedFile(f"{path} is damaged: it is not what the run wrote.")
        return data

    def has(self, name: str) -> bool:
        """Tell whether a whole file is there, and verify it."""
        if require_file(self.path / name).exists():
            self._read_verified(name)
            return True
        if self.digests and name in self.digests.written:
            self.missing.append(name)
        return False

    def replace(self, name: str, text: str) -> None:
        """Write a whole file. Its digest is recorded first, along with that of the old version."""
        data = text.encode()
        if self.digests_to_extend().add_version(self.path / name, data):
            self.write()
        files.write_file(self.path / name, data)

    def read_config(self) -> Config:
        """Return the config of the run, with the former defaults that an older one relies on."""
        return name_former_defaults(self.read_stated_config())

    def read_stated_config(self) -> Config:
        """Return the config as config.toml has it."""
        path = self.path / "config.toml"
        return Config.from_values(Config.parse(self.read_verified("config.toml"), path))
