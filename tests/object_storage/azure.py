"""Microsoft's emulator of Azure Blob Storage on this machine; install it with `npm install azurite`.

The program `azurite-blob` must be in $PATH.
"""

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate

PROGRAM = "azurite-blob"
_ACCOUNT = "clips"
_KEY = base64.b64encode(b"a key of an account for tests").decode()
_VERSION = "2021-12-02"
_START_S = 60


@dataclass(frozen=True)
class AzureServer:
    """Running emulator with one account."""

    port: int

    def environment(self, *, port: int | None = None) -> dict[str, str]:
        """Return the environment variables that make clients use this server, or a proxy in front of it."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port or self.port}/{_ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }

    def make_bucket(self, name: str) -> str:
        """Create an empty container and return its URL."""
        date = formatdate(usegmt=True)
        named = f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
        signed = hmac.new(base64.b64decode(_KEY), ("PUT" + "\n" * 12 + named).encode(), hashlib.sha256).digest()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{_ACCOUNT}/{name}?restype=container",
            method="PUT",
            headers={
                "x-ms-date": date,
                "x-ms-version": _VERSION,
                "Content-Length": "0",
                "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(signed).decode()}",
            },
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
        return f"az://{name}"


def is_installed() -> bool:
    """Return True if the emulator is installed."""
    return shutil.which(PROGRAM) is not None


@contextlib.contextmanager
def azure_server() -> Iterator[AzureServer]:
    """Run an emulator within the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        # The emulator supports older API versions than the client, which does not need the later ones.
        flags = (
            "--blobPort",
            str(port),
            "--location",
            folder,
            "--silent",
            "--skipApiVersionCheck",
            "--disableTelemetry",
        )
        environment = {**os.environ, "AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_KEY}"}
        process = subprocess.Popen(
            [PROGRAM, *flags], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        try:
            _await(port)
            yield AzureServer(port)
        finally:
            process.terminate()
            process.wait()


def _await(port: int) -> None:
    last = time.monotonic() + _START_S
    while time.monotonic() < last:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise TimeoutError(f"{PROGRAM} does not listen after {_START_S} s")
