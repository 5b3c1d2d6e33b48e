"""Server for the XML API of Google Cloud Storage, as far as the client of this project uses it.

Moto's S3 server holds the objects, because the XML API largely equals S3's: listings, ranges, multipart uploads. A
front end (a separate process) adds the differences, according to https://cloud.google.com/storage/docs/xml-api: bearer
tokens signed by a service account, the generation of each object, conditions on it, and 404 for the deletion of a
missing object.
"""

import asyncio
import base64
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote, unquote

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from tests.object_storage.faults import Message, Proxy, error_answer, serve
from tests.object_storage.server import ACCESS_KEY, S3Server, start_server

_EMAIL = "test@clips.example"
_CLOCK_S = 300
_AS_OWNER = f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20260101/us-east-1/s3/aws4_request, Signature=0".encode()
_CONDITION, _GENERATION = "x-goog-if-generation-match", "x-goog-generation"


@dataclass(frozen=True)
class GoogleServer:
    """Front end of a running server.

    Attributes:
        key_file: Key file of the service account that may use it.
    """

    port: int
    server: S3Server
    key_file: Path

    def environment(self, *, port: int | None = None) -> dict[str, str]:
        """Return the environment variables that make clients use this server, or a proxy in front of it."""
        return {
            "GOOGLE_APPLICATION_CREDENTIALS": str(self.key_file),
            "GOOGLE_BASE_URL": f"http://127.0.0.1:{port or self.port}",
            "GOOGLE_ALLOW_HTTP": "true",
        }

    def make_bucket(self, name: str) -> str:
        """Create an empty bucket and return its URL."""
        self.server.make_bucket(name)
        return f"gs://{name}"


@contextlib.contextmanager
def google_server(server: S3Server) -> Iterator[GoogleServer]:
    """Start a front end of a server; it stops at the end of the block, or with this process."""
    with tempfile.TemporaryDirectory() as folder:
        key_file = write_key_file(Path(folder) / "key.json")
        with start_server(["tests.object_storage.google", str(server.port), str(key_file)]) as port:
            yield GoogleServer(port, server, key_file)


def write_key_file(path: Path) -> Path:
    """Write the key file of a new service account, in Google's format."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    content = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {"type": "service_account", "private_key_id": "1", "client_email": _EMAIL}
    path.write_text(json.dumps({**account, "private_key": content.decode()}))
    return path


@dataclass
class _Front(Proxy):
    public_key: rsa.RSAPublicKey | None = None
    generations: dict[str, int] = field(default_factory=dict)  # of each object, by its path
    locks: dict[str, asyncio.Lock] = field(default_factory=dict)

    async def forward(
        self, request: Message, method: str, upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> tuple[Message, tuple[asyncio.StreamReader, asyncio.StreamWriter] | None]:
        """Serve one request as Google does, with the help of the S3 server."""
        headers, path = request.headers(), unquote(request.first_line()[1].partition("?")[0])
        if not self._may(headers.get("authorization", "")):
            return error_answer(401, "AuthenticationRequired", method), upstream
        async with self.locks.setdefault(path, asyncio.Lock()):
            known = self.generations.get(path, 0)
            if (condition := headers.get(_CONDITION)) is not None and int(condition) != known:
                return error_answer(412, "PreconditionFailed", method), upstream
            if method == "DELETE" and "uploadId=" not in request.first_line()[1] and not known:
                return error_answer(404, "NoSuchKey"), upstream
            answer, left = await super().forward(_as_s3(request), method, upstream)
            if answer.first_line()[1] not in ("200", "204", "206"):
                return answer, left
            if method == "DELETE":
                self.generations.pop(path, None)
            elif (method == "PUT" and "uploadId=" not in request.first_line()[1]) or _completes(request, method):
                known = self.generations[path] = max(time.time_ns() // 1000, known + 1)
            return answer.with_header(_GENERATION, str(known)), left

    def _may(self, authorization: str) -> bool:
        """Return True if the account signed the token and the token is valid now."""
        try:
            head, claims, signature = authorization.removeprefix("Bearer ").split(".")
            assert self.public_key is not None
            self.public_key.verify(
                _decode_base64(signature), f"{head}.{claims}".encode(), padding.PKCS1v15(), hashes.SHA256()
            )
            record = json.loads(_decode_base64(claims))
        except (ValueError, InvalidSignature):
            return False
        return record["iss"] == _EMAIL and record["iat"] - _CLOCK_S < time.time() < record["exp"] + _CLOCK_S


def _completes(request: Message, method: str) -> bool:
    return method == "POST" and "uploadId=" in request.first_line()[1]


def _as_s3(request: Message) -> Message:
    """Return a request with S3's headers in place of Google's, and a path that quotes only what it must."""
    method, path, version = request.first_line()
    path, mark, query = path.partition("?")
    first = f"{method} {quote(unquote(path))}{mark}{query} {version}".encode()
    request = replace(request, head=first + request.head[request.head.index(b"\r\n") :])
    head = re.sub(rb"(?i)\r\nauthorization:[^\r]*", b"\r\nAuthorization: " + _AS_OWNER, request.head)
    return Message(re.sub(rb"(?i)\r\nx-goog-copy-source:", b"\r\nx-amz-copy-source:", head), request.body, True)


def _decode_base64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _main(upstream_port: int, key_file: Path) -> None:
    key = serialization.load_pem_private_key(json.loads(key_file.read_text())["private_key"].encode(), None)
    public = key.public_key()
    assert isinstance(public, rsa.RSAPublicKey)
    asyncio.run(serve(_Front(upstream_port, public_key=public)))
    os._exit(0)


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]))
