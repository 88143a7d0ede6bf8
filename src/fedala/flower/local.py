"""A federation on one machine: SuperLink and SuperNodes on loopback, with TLS and node keys."""

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
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedala.errors import RunError
from fedala.flower.processes import FAMILY, Processes
from fedala.runs.config_values import toml

#: Makes Flower work offline: it installs nothing, reports nothing and does not look for updates.
OFFLINE_ENVIRONMENT = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


class LocalFederation(Processes):
    """A SuperLink and its SuperNodes, with all their files in `folder`. They end with the context.

    Without a folder, they get a temporary one. It is deleted however this process ends, because it
    holds private keys.
    """

    def __init__(
        self, folder: Path | None = None, *, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(folder)
        self.environment = {**os.environ, **OFFLINE_ENVIRONMENT, **(environment or {})}
        # Flower starts its own programs by their names.
        self.environment["PATH"] = os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        )
        self.port = find_free_port()

    def __enter__(self) -> Self:
        try:
            super().__enter__()
            self._write_files()
            self.start_superlink()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                reason = error.strerror or error
                raise RunError(
                    f"A federation cannot be set up in {self.folder}: {reason}."
                ) from None
            raise
        return self

    def _write_files(self) -> None:
        """Write certificates, keys and the config of `flwr`."""
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

    def start_superlink(self, seconds: float = 60) -> None:
        """Start or restart the SuperLink, and wait until it accepts connections."""
        keys = self.folder / "keys"
        process = self._start_program(
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
                log = self.folder / "logs" / "superlink.log"
                raise RunError(f"The SuperLink does not start: see {log}.")
            time.sleep(0.1)

    def register_key(self, name: str) -> Path:
        """Make a key pair for a node and register it with the SuperLink; return its path."""
        key = make_key(self.folder / "keys" / name)
        self.run_flwr("supernode", "register", f"{key}.pub", "here")
        return key

    def start_node(
        self, client: int, *, key: Path | None = None, ca: Path | None = None, **config: Any
    ) -> None:
        """Start or restart the SuperNode of a client."""
        registered = self.folder / "keys" / f"node-{client}"
        if key is None:
            key = registered if registered.exists() else self.register_key(f"node-{client}")
        config = {
            "partition-id": client,
            "state-dir": str(self.folder / f"node-{client}"),
            **config,
        }
        self._start_program(
            f"node-{client}", "flower-supernode", "--superlink", f"127.0.0.1:{self.port}",
            "--root-certificates", str(ca or self.folder / "keys" / "ca.crt"),
            "--auth-supernode-private-key", str(key), "--port", str(find_free_port()),
            "--node-config", " ".join(f"{name}={toml(value)}" for name, value in config.items()),
        )  # fmt: skip

    def run_flwr(self, *arguments: str) -> dict[str, Any]:
        """Run a command of `flwr`; return its answer."""
        process = self._run_program(120, *arguments, "--format", "json")
        try:
            answer: dict[str, Any] = json.loads(process.stdout)
        except ValueError:
            answer = {"success": False, "error-message": (process.stdout + process.stderr).strip()}
        if process.returncode or not answer.get("success"):
            problem = answer.get("error-message", answer)
            raise RunError(f"flwr {' '.join(arguments[:2])} failed: {problem}")
        return answer

    def submit(self, app: Path, **run_config: Any) -> str:
        """Submit an app; return the id of its run."""
        overrides = " ".join(f"{key}={toml(value)}" for key, value in run_config.items())
        options = ["--run-config", overrides] if overrides else []
        return str(self.run_flwr("run", str(app), "here", *options)["run-id"])

    def read_status(self, run: str) -> str:
        """Return the status of a run: `finished:completed`, `finished:failed`, `running`, …"""
        [entry] = self.run_flwr("list", "here", "--run-id", run)["runs"]
        return str(entry["status"])

    def read_run_log(self, run: str) -> str:
        """Return the log of a run's server app."""
        process = self._run_program(60, "log", run, "here", "--show")
        return process.stdout + process.stderr

    def read_log(self, name: str) -> str:
        """Return the log of the SuperLink or of a node."""
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    def _start_program(self, name: str, command: str, *arguments: str) -> "subprocess.Popen[bytes]":
        log = self.folder / "logs" / f"{name}.log"
        return self.spawn(name, [find_program(command), *arguments], self.environment, log)

    def _run_program(self, seconds: float, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [find_program("flwr"), *arguments],
            env={**self.environment, FAMILY: f"{self.folder}/flwr"},
            capture_output=True,
            text=True,
            timeout=seconds,
        )


def find_program(name: str) -> str:
    """Return the path of a program in this Python's environment."""
    return str(Path(sys.executable).with_name(name))


def find_free_port() -> int:
    """Return a port on loopback that no program uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_key(path: Path) -> Path:
    """Write a key pair like `ssh-keygen -t ecdsa -b 384`, to `path` and `path.pub`."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_secret(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    Path(f"{path}.pub").write_bytes(
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    )
    return path


def make_certificates(folder: Path) -> None:
    """Write a certificate authority, and the certificate and key of a server on loopback."""
    authority_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedala demo CA")])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1"))]
    issuing = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    authority = (
        _build_certificate(issuer, issuer, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_make_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(issuing, critical=False)
    )
    server = (
        _build_certificate(subject, issuer, server_key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuing, critical=False)
    )
    for name, certificate in (("ca.crt", authority), ("server.crt", server)):
        signed = certificate.sign(authority_key, hashes.SHA384())
        (folder / name).write_bytes(signed.public_bytes(Encoding.PEM))
    secret = server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write_secret(folder / "server.key", secret)


def _build_certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    """Build a certificate that is valid for a week."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=7))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _make_usage(**uses: bool) -> x509.KeyUsage:
    """Say what a key is for. From Python 3.13 on, TLS refuses an authority that does not say it."""
    names = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
        "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{name: uses.get(name, False) for name in names})


def _write_secret(path: Path, secret: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(secret)
