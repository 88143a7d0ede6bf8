"""A federation on one machine: a SuperLink and its SuperNodes on loopback, with TLS and authentication, as on many."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fedala.config import toml
from fedala.errors import RunError

#: Flower as it is used offline: it installs nothing, reports nothing and looks for no updates.
OFFLINE = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

#: What the processes of a SuperLink or a node are known by.
FAMILY = "FEDALA_FEDERATION"


class LocalFederation:
    """Everything is in `folder`, and everything that was started ends with the context."""

    def __init__(self, folder: Path, *, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.environment = {**os.environ, **OFFLINE, **(environment or {}), "FLWR_HOME": str(folder / "flwr")}
        # Flower starts programs of its own by their names.
        self.environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for name in ("flwr", "keys", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        make_certificates(self.folder / "keys")
        connection = {"address": f"127.0.0.1:{self.port}", "root-certificates": str(self.folder / "keys" / "ca.crt")}
        lines = ["[superlink]", 'default = "here"', "", "[superlink.here]"]
        lines += [f"{key} = {toml(value)}" for key, value in connection.items()]
        (self.folder / "flwr" / "config.toml").write_text("\n".join(lines) + "\n")
        with ExitStack() as stack:
            stack.callback(self.stop)
            if threading.current_thread() is threading.main_thread():  # who is asked to end ends what it has started
                stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
            self.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, seconds: float = 60) -> None:
        """Starts the SuperLink, anew or again, and waits until it answers."""
        keys = self.folder / "keys"
        process = self._spawn(
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
                raise RunError(f"The SuperLink does not start: see {self.folder / 'logs' / 'superlink.log'}.")
            time.sleep(0.1)

    def register(self, name: str) -> Path:
        """A key of a node's own, made known to the SuperLink."""
        key = make_key(self.folder / "keys" / name)
        self.flwr("supernode", "register", f"{key}.pub", "here")
        return key

    def node(self, client: int, *, key: Path | None = None, ca: Path | None = None, **config: Any) -> None:
        """Starts the SuperNode of a client, anew or again."""
        known = self.folder / "keys" / f"node-{client}"
        key = key or (known if known.exists() else self.register(f"node-{client}"))
        config = {"partition-id": client, "state-dir": str(self.folder / f"node-{client}"), **config}
        self._spawn(
            f"node-{client}", "flower-supernode", "--superlink", f"127.0.0.1:{self.port}",
            "--root-certificates", str(ca or self.folder / "keys" / "ca.crt"),
            "--auth-supernode-private-key", str(key), "--port", str(free_port()),
            "--node-config", " ".join(f"{name}={toml(value)}" for name, value in config.items()),
        )  # fmt: skip

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """A command of `flwr`, and its answer."""
        command = [program("flwr"), *arguments, "--format", "json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            answer = {"success": False, "error-message": (done.stdout + done.stderr).strip()}
        if done.returncode or not answer.get("success"):
            raise RunError(f"flwr {' '.join(arguments[:2])} failed: {answer.get('error-message', answer)}")
        return answer

    def run(self, app: Path, **run_config: Any) -> str:
        """Submits an app; returns the run's id."""
        overrides = [f"{key}={toml(value)}" for key, value in run_config.items()]
        answer = self.flwr("run", str(app), "here", *(["--run-config", " ".join(overrides)] if overrides else []))
        return str(answer["run-id"])

    def status(self, run: str) -> str:
        """`finished:completed`, `finished:failed`, `running`, …"""
        [found] = self.flwr("list", "here", "--run-id", run)["runs"]
        return str(found["status"])

    def run_log(self, run: str) -> str:
        """What the server app has said."""
        command = [program("flwr"), "log", run, "here", "--show"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def kill(self, name: str) -> None:
        """Ends the SuperLink or a node, with everything that it has started: Flower's own processes leave its group."""
        end = time.monotonic() + 10
        while (left := family(f"{self.folder}/{name}")) and time.monotonic() < end:  # they may be starting others
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        with suppress(subprocess.TimeoutExpired):
            self.processes[name].wait(10)

    def stop(self) -> None:
        """Ends everything that was started."""
        for process in self.processes.values():
            process.terminate()
        end = time.monotonic() + 5
        for name, process in self.processes.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
            self.kill(name)

    def log(self, name: str) -> str:
        """What the SuperLink or a node has said."""
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    def _spawn(self, name: str, command: str, *arguments: str) -> "subprocess.Popen[bytes]":
        with (self.folder / "logs" / f"{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [program(command), *arguments],
                env={**self.environment, FAMILY: f"{self.folder}/{name}"},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C is for whoever started this, who then ends it in order
            )
        return self.processes[name]


def family(name: str) -> list[int]:
    """The processes that were started under this name, and all that they have started, whoever their parent is now."""
    mark = f"{FAMILY}={name}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


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
    Path(f"{path}.pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return path


def make_certificates(folder: Path) -> None:
    """A certificate authority of one's own, and the certificate of a server on loopback that it has signed."""
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedala demo CA")])
    now = datetime.now(UTC)

    def certificate(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + timedelta(days=7))

    ca = certificate(name, authority).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    names = [x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1"))]
    own = certificate(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")]), server)
    own = own.add_extension(x509.SubjectAlternativeName(names), critical=False)
    own = own.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    (folder / "ca.crt").write_bytes(ca.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM))
    (folder / "server.crt").write_bytes(own.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM))
    _write(folder / "server.key", server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _write(path: Path, secret: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(secret)
