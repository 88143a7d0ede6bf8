"""A federation on one machine: a SuperLink and its SuperNodes on loopback, with TLS and authentication, as on many."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from fedala.errors import RunError
from fedala.flower.processes import FAMILY, Processes
from fedala.runs.config import toml

#: Flower as it is used offline: it installs nothing, reports nothing and looks for no updates.
OFFLINE = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


class LocalFederation(Processes):
    """A SuperLink and its SuperNodes, with all their files in `folder`. They end with the context.

    Without a folder, they get a temporary one. It is deleted however this process ends, so that no
    private key is left.
    """

    def __init__(
        self, folder: Path | None = None, *, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(folder)
        self.environment = {**os.environ, **OFFLINE, **(environment or {})}
        # Flower starts programs of its own by their names.
        self.environment["PATH"] = os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        )
        self.port = free_port()

    def __enter__(self) -> Self:
        try:
            super().__enter__()
            self._set_up()
            self.start()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                why = error.strerror or error
                raise RunError(f"No federation can be set up in {self.folder}: {why}.") from None
            raise
        return self

    def _set_up(self) -> None:
        self.environment["FLWR_HOME"] = str(self.folder / "flwr")
        for name in ("flwr", "keys", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        make_certificates(self.folder / "keys")
        connection = {
            "address": f"127.0.0.1:{self.port}",
            "root-certificates": str(self.folder / "keys" / "ca.crt"),
        }
        lines = ["[superlink]", 'default = "here"', "", "[superlink.here]"]
        lines += [f"{key} = {toml(value)}" for key, value in connection.items()]
        (self.folder / "flwr" / "config.toml").write_text("\n".join(lines) + "\n")

    def start(self, seconds: float = 60) -> None:
        """Starts the SuperLink, anew or again, and waits until it answers."""
        keys = self.folder / "keys"
        process = self._start(
            "superlink", "flower-superlink", "--host", "127.0.0.1", "--port", str(self.port),
            "--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.crt"),
            "--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth",
            "--database", str(self.folder / "superlink.db"),
        )  # fmt: skip
        end = time.monotonic() + seconds
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            if process.poll() is not None or time.monotonic() > end:
                raise RunError(
                    f"The SuperLink does not start: see {self.folder / 'logs' / 'superlink.log'}."
                )
            time.sleep(0.1)

    def register(self, name: str) -> Path:
        """A key of a node's own, made known to the SuperLink."""
        key = make_key(self.folder / "keys" / name)
        self.flwr("supernode", "register", f"{key}.pub", "here")
        return key

    def node(
        self, client: int, *, key: Path | None = None, ca: Path | None = None, **config: Any
    ) -> None:
        """Starts the SuperNode of a client, anew or again."""
        known = self.folder / "keys" / f"node-{client}"
        key = key or (known if known.exists() else self.register(f"node-{client}"))
        config = {
            "partition-id": client,
            "state-dir": str(self.folder / f"node-{client}"),
            **config,
        }
        self._start(
            f"node-{client}", "flower-supernode", "--superlink", f"127.0.0.1:{self.port}",
            "--root-certificates", str(ca or self.folder / "keys" / "ca.crt"),
            "--auth-supernode-private-key", str(key), "--port", str(free_port()),
            "--node-config", " ".join(f"{name}={toml(value)}" for name, value in config.items()),
        )  # fmt: skip

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """A command of `flwr`, and its answer."""
        done = self._run(120, *arguments, "--format", "json")
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            answer = {"success": False, "error-message": (done.stdout + done.stderr).strip()}
        if done.returncode or not answer.get("success"):
            raise RunError(
                f"flwr {' '.join(arguments[:2])} failed: {answer.get('error-message', answer)}"
            )
        return answer

    def run(self, app: Path, **run_config: Any) -> str:
        """Submits an app; returns the run's id."""
        overrides = [f"{key}={toml(value)}" for key, value in run_config.items()]
        answer = self.flwr(
            "run", str(app), "here", *(["--run-config", " ".join(overrides)] if overrides else [])
        )
        return str(answer["run-id"])

    def status(self, run: str) -> str:
        """`finished:completed`, `finished:failed`, `running`, …"""
        [found] = self.flwr("list", "here", "--run-id", run)["runs"]
        return str(found["status"])

    def run_log(self, run: str) -> str:
        """What the server app has said."""
        done = self._run(60, "log", run, "here", "--show")
        return done.stdout + done.stderr

    def log(self, name: str) -> str:
        """What the SuperLink or a node has said."""
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    def _start(self, name: str, command: str, *arguments: str) -> "subprocess.Popen[bytes]":
        log = self.folder / "logs" / f"{name}.log"
        return self.spawn(name, [program(command), *arguments], self.environment, log)

    def _run(self, seconds: float, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [program("flwr"), *arguments],
            env={**self.environment, FAMILY: f"{self.folder}/flwr"},
            capture_output=True,
            text=True,
            timeout=seconds,
        )


def program(name: str) -> str:
    """A program of this Python's environment."""
    return str(Path(sys.executable).with_name(name))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_key(path: Path) -> Path:
    """A node's key pair, as `ssh-keygen -t ecdsa -b 384` makes it: `path` and `path.pub`."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    Path(f"{path}.pub").write_bytes(
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    )
    return path


def make_certificates(folder: Path) -> None:
    """A certificate authority of one's own, and the certificate of a server on loopback that it has signed."""
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedala demo CA")])
    now = datetime.now(UTC)

    def certificate(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(name)
            .public_key(key.public_key())
        )
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - timedelta(minutes=5)).not_valid_after(
            now + timedelta(days=7)
        )

    ca = certificate(name, authority).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1"))]
    own = certificate(
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")]), server
    )
    own = own.add_extension(x509.SubjectAlternativeName(names), critical=False)
    own = own.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    (folder / "ca.crt").write_bytes(ca.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM))
    (folder / "server.crt").write_bytes(
        own.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM)
    )
    _write(
        folder / "server.key",
        server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def _write(path: Path, secret: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(secret)
