"""Real S3 server on this machine: moto's, in a separate process, on a free port."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

_ROOT = Path(__file__).parent.parent.parent
ACCESS_KEY, SECRET_KEY = "test-key", "test-secret"


@dataclass(frozen=True)
class S3Server:
    """S3 server that accepts any credentials until `require_known_users` is called."""

    port: int

    @property
    def endpoint(self) -> str:
        """URL for AWS_ENDPOINT_URL."""
        return f"http://127.0.0.1:{self.port}"

    def environment(self, *, endpoint: str | None = None) -> dict[str, str]:
        """Return the environment variables that make AWS clients use this server, or a proxy in front of it."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name: str) -> str:
        """Create an empty bucket and return its URL."""
        self._ask("PUT", f"/{name}", b"")
        return f"s3://{name}"

    def require_known_users(self, *, required: bool = True) -> None:
        """Reject unknown credentials, which means all of them, or accept any credentials again."""
        self._ask("POST", "/moto-api/reset-auth", b"0.0" if required else b"inf")

    def put(self, address: str, key: str, content: bytes = b"") -> None:
        """Write an object with any name under a URL, as programs that do not know clipmill do."""
        self._ask("PUT", quote(f"/{address.removeprefix('s3://')}/{key}"), content)

    def keys(self, bucket: str) -> set[str]:
        """Return the names of all objects in a bucket, at most 1,000."""
        answer = self._ask("GET", f"/{bucket.removeprefix('s3://')}?list-type=2&encoding-type=url", None).decode()
        return {unquote(key) for key in re.findall("<Key>(.*?)</Key>", answer)}

    def _ask(self, method: str, path: str, content: bytes | None) -> bytes:
        request = urllib.request.Request(
            self.endpoint + path, data=content, method=method, headers={"Content-Type": "text/plain"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start a server; it stops at the end of the block, or with this process."""
    environment = {**os.environ, "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true"}
    with start_server(["tests.object_storage.server"], environment) as port:
        yield S3Server(port)


@contextlib.contextmanager
def start_server(arguments: list[str], environment: dict[str, str] | None = None) -> Iterator[int]:
    """Start `python -m ARGUMENTS`, which prints its port and runs until its standard input closes."""
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(
        command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield int(process.stdout.readline())
        process.stdin.close()


def _serve() -> None:
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    WSGIRequestHandler.protocol_version = "HTTP/1.1"  # persistent connections, as on a real server
    application: Any = DomainDispatcherApplication(create_backend_app)
    # Without this cache, each request would list the folder of all services and try hundreds of patterns.
    application.get_backend_for_host = cache(application.get_backend_for_host)
    server: Any = make_server((*sys.argv[1:], "127.0.0.1")[0], 0, application, threaded=True)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _serve()
