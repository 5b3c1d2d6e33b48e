"""HTTP proxy that injects faults, in a separate process: latency, bandwidth, errors, cut responses, network failures.

`faulty(port)` starts a proxy in front of a server. Faults are set and requests are counted over its path `/_faults`, so
that benchmarks and tests can control it from any process.

The proxy also issues keys that expire, and rejects them afterwards (ExpiredToken). It acts as the metadata service of
an instance and of a container, and replaces the keys in responses of the server's STS. The name of such a key is the
time at which it expires, so that any program can create one.
"""

import asyncio
import contextlib
import json
import re
import ssl
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tests.object_storage.server import start_server

_CONTROL = "/_faults"
_BLOCK_BYTES = 64 * 1024
METADATA, CONTAINER = "/latest/meta-data/iam/security-credentials/", "/container/keys"
_KEY, _USED_KEY = "EXPIRES", re.compile(rb"Credential=(EXPIRES[0-9.]+)")


def expiring_key(life_s: float) -> dict[str, str]:
    """Return a key that the proxy accepts for some seconds, in AWS's format."""
    end_s = time.time() + life_s
    end = datetime.fromtimestamp(end_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "LastUpdated": end,
        "AccessKeyId": f"{_KEY}{end_s:.1f}",
        "SecretAccessKey": "secret",
        "Token": "token",
        "Expiration": end,
    }


@dataclass(frozen=True)
class Fault:
    """Fault that happens to requests whose method and path match.

    Attributes:
        kind: "delay": the response is delayed by `delay_s`; "error": the proxy responds with `status` and the S3 error
            `code`, and the server does not see the request; "cut": the connection is closed after half of the response
            body; "lost": the server executes the request, but the response is lost; "hang": packets are dropped, and
            there is no response until the client gives up or the faults are replaced; "late": as "hang", but the server
            gets the request when the faults are replaced, whether or not the client still waits; "reset": the
            connection is reset, and the server does not see the request; "etag": the response has a different ETag than
            the object.
        method: Method such as GET or PUT; None for any method.
        path: Regular expression that is searched for in path and query.
        skip: Number of matching requests that pass before the fault.
        times: Number of requests with the fault; None for all.
        every: Interval of the matching requests with the fault: every `every`-th one.
        for_s: Seconds from the first request with the fault to its end; None for no end.
        spreads: True if the fault happens to all requests after its first one.
    """

    kind: Literal["delay", "error", "cut", "lost", "hang", "late", "reset", "etag"]
    method: str | None = None
    path: str = ""
    skip: int = 0
    times: int | None = None
    every: int = 1
    for_s: float | None = None
    spreads: bool = False
    delay_s: float = 0.0
    status: int = 503
    code: str = "SlowDown"


def vanished_key(path: str, **when: Any) -> Fault:
    """Return the fault that makes an object appear deleted."""
    return Fault("error", method="GET", path=path, status=404, code="NoSuchKey", **when)


@dataclass(frozen=True)
class Seen:
    """Requests since the last call of `Faults.set`.

    Attributes:
        requests: (method, path and query) of each request, in order.
        num_bytes: Number of bytes in the bodies of requests and responses.
        num_faults: Number of requests with a fault.
        keys: Expiring keys that signed requests.
        num_expired: Number of requests that were rejected because their key had expired.
    """

    requests: tuple[tuple[str, str], ...]
    num_bytes: int
    num_faults: int
    keys: frozenset[str]
    num_expired: int

    def methods(self) -> Counter[str]:
        """Count the requests by method."""
        return Counter(method for method, _ in self.requests)


@dataclass(frozen=True)
class Faults:
    """Running proxy; with a file that contains a certificate and its key, it uses TLS."""

    port: int
    certificate: Path | None = None

    @property
    def endpoint(self) -> str:
        """URL of the proxy."""
        return f"http{'s' if self.certificate else ''}://127.0.0.1:{self.port}"

    def set(
        self, *faults: Fault, latency_s: float = 0.0, bytes_per_s: float | None = None, key_life_s: float = 900.0
    ) -> None:
        """Replace all faults, and clear the recorded requests.

        Args:
            latency_s: Delay of every response.
            bytes_per_s: Bandwidth of all connections together.
            key_life_s: Seconds until the keys that the proxy issues expire.
        """
        rules = {"faults": [asdict(fault) for fault in faults], "latency_s": latency_s, "bytes_per_s": bytes_per_s}
        rules["key_life_s"] = key_life_s
        self._ask(urllib.request.Request(self.endpoint + _CONTROL, data=json.dumps(rules).encode(), method="PUT"))

    def seen(self) -> Seen:
        """Return the requests since the last `set`."""
        record = json.loads(self._ask(urllib.request.Request(self.endpoint + _CONTROL)))
        requests = tuple((method, path) for method, path in record["requests"])
        return Seen(requests, record["bytes"], record["faults"], frozenset(record["keys"]), record["expired"])

    def _ask(self, request: urllib.request.Request) -> bytes:
        context = ssl.create_default_context(cafile=self.certificate) if self.certificate else None
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return bytes(answer.read())


@contextlib.contextmanager
def faulty(port: int, *, certificate: Path | None = None) -> Iterator[Faults]:
    """Start a proxy in front of the server on `port` of this machine.

    With a certificate and its key, the proxy uses TLS.
    """
    further = [] if certificate is None else [str(certificate)]
    with start_server(["tests.object_storage.faults", str(port), *further]) as own_port:
        yield Faults(own_port, certificate)


@dataclass
class Message:
    """Request or response."""

    head: bytes  # including the empty line at its end
    body: bytes
    stays_open: bool
    begun_s: float = 0.0  # time at which the head had arrived

    def first_line(self) -> list[str]:
        """Method, path and version of a request; version, status and reason of a response."""
        return self.head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)

    def headers(self) -> dict[str, str]:
        """Headers, by their lower-case names."""
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}

    def with_header(self, name: str, value: str) -> "Message":
        """Return the message with an additional header."""
        return replace(self, head=self.head[:-2] + f"{name}: {value}\r\n\r\n".encode())


@dataclass
class Proxy:
    """The proxy itself, which serves requests until its process exits."""

    upstream_port: int
    rules: list[Fault] = field(default_factory=list)
    matches: Counter[int] = field(default_factory=Counter)
    began_s: dict[int, float] = field(default_factory=dict)  # start of each fault, by its number
    spreading: Fault | None = None
    are_replaced: asyncio.Event = field(default_factory=asyncio.Event)  # set when the faults are replaced
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    free_from_s: float = 0.0  # time at which the line is idle again
    requests: list[tuple[str, str]] = field(default_factory=list)
    num_bytes: int = 0
    num_faults: int = 0
    key_life_s: float = 900.0
    keys: set[str] = field(default_factory=set)
    num_expired: int = 0

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of one connection."""
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while request := await _read_message(reader, writer):
                method, path, *_ = request.first_line()
                if path.startswith(_CONTROL):
                    writer.write(self._control(method, request.body))
                    await writer.drain()
                    continue
                self.requests.append((method, path))
                if "Action=AssumeRole" in path:
                    request = form_of(path)
                fault = self._fault_of(method, path)
                if fault is not None and fault.kind == "reset":
                    writer.transport.abort()
                    break
                if fault is not None and fault.kind in ("hang", "late"):
                    await self._held_back(request, method, fault, reader, writer)
                    break
                if fault is not None and fault.kind == "error":
                    answer = error_answer(fault.status, fault.code, method)
                elif path.startswith(("/latest/", CONTAINER)):
                    answer = self._metadata(path)
                elif self._has_expired(request):
                    answer = error_answer(400, "ExpiredToken", method)
                else:
                    if upstream is None:
                        upstream = await asyncio.open_connection("127.0.0.1", self.upstream_port)
                    answer, upstream = await self.forward(request, method, upstream)
                    if b"Action=AssumeRole" in request.body:
                        answer = self._with_key(answer)
                self.num_bytes += len(request.body)
                await asyncio.sleep(self.latency_s + (fault.delay_s if fault is not None else 0.0))
                if fault is not None and fault.kind == "lost":
                    break
                if fault is not None and fault.kind == "etag":
                    answer = replace(answer, head=re.sub(rb'(?i)\r\netag: *"', rb"\g<0>other-", answer.head))
                cut = fault is not None and fault.kind == "cut"
                await self._send(writer, answer, len(answer.body) // 2 if cut else len(answer.body))
                if cut or not request.stays_open:
                    break
        for stream in (writer, upstream[1] if upstream else None):
            if stream is not None:
                stream.close()

    def _metadata(self, path: str) -> Message:
        if path == METADATA:
            return answer_of(b"role")
        return answer_of(b"token" if path.endswith("/token") else json.dumps(expiring_key(self.key_life_s)).encode())

    def _has_expired(self, request: Message) -> bool:
        signed = _USED_KEY.search(request.head.replace(b"%2F", b"/"))
        if signed is None:
            return False
        key = signed[1].decode()
        self.keys.add(key)
        expired = request.begun_s > float(key.removeprefix(_KEY))
        self.num_expired += expired
        return expired

    def _with_key(self, answer: Message) -> Message:
        body = answer.body
        for name, value in expiring_key(self.key_life_s).items():
            body = re.sub(rf"<{name}>[^<]*<".encode(), f"<{name}>{value}<".encode(), body)
        return answer_of(body, kind="text/xml") if b" 200 " in answer.head.split(b"\r\n")[0] else answer

    async def _held_back(
        self, request: Message, method: str, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Wait until the client gives up, or the faults are replaced; then forward a late request in any case."""
        replaced = self.are_replaced
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(replaced.wait())]
        if fault.kind == "hang":
            waits.append(asyncio.ensure_future(reader.read()))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if fault.kind == "late":
            upstream = await asyncio.open_connection("127.0.0.1", self.upstream_port)
            answer, left = await self.forward(request, method, upstream)
            if left is not None:
                left[1].close()
            writer.write(answer.head + answer.body)
            await writer.drain()
        writer.transport.abort()

    async def forward(
        self, request: Message, method: str, upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> tuple[Message, tuple[asyncio.StreamReader, asyncio.StreamWriter] | None]:
        """Return the server's response to a request, and its connection if that stays open."""
        upstream[1].write(request.head + request.body)
        await upstream[1].drain()
        answer = await _read_message(upstream[0], None, of=method)
        if answer is None:
            raise ConnectionError("the server closed the connection")
        if answer.stays_open:
            return answer, upstream
        upstream[1].close()
        return answer, None

    async def _send(self, writer: asyncio.StreamWriter, answer: Message, size_bytes: int) -> None:
        writer.write(answer.head)
        for begin in range(0, size_bytes, _BLOCK_BYTES):
            block = answer.body[begin : min(begin + _BLOCK_BYTES, size_bytes)]
            if self.bytes_per_s is not None:
                now_s = asyncio.get_running_loop().time()
                self.free_from_s = max(self.free_from_s, now_s) + len(block) / self.bytes_per_s
                await asyncio.sleep(self.free_from_s - now_s)
            writer.write(block)
            await writer.drain()
            self.num_bytes += len(block)
        await writer.drain()

    def _fault_of(self, method: str, path: str) -> Fault | None:
        if self.spreading is not None:
            return self.spreading
        for number, fault in enumerate(self.rules):
            if fault.method not in (None, method) or not re.search(fault.path, path):
                continue
            before = self.matches[number] - fault.skip
            self.matches[number] += 1
            if before < 0 or before % fault.every or (fault.times is not None and before // fault.every >= fault.times):
                continue
            now_s = asyncio.get_running_loop().time()
            if fault.for_s is not None and now_s > self.began_s.setdefault(number, now_s) + fault.for_s:
                continue
            self.num_faults += 1
            self.spreading = fault if fault.spreads else None
            return fault
        return None

    def _control(self, method: str, body: bytes) -> bytes:
        if method == "PUT":
            rules = json.loads(body)
            self.rules = [Fault(**fault) for fault in rules["faults"]]
            self.latency_s, self.bytes_per_s = rules["latency_s"], rules["bytes_per_s"]
            self.key_life_s, self.keys, self.num_expired = rules["key_life_s"], set(), 0
            self.matches, self.requests, self.num_bytes, self.num_faults = Counter(), [], 0, 0
            self.began_s, self.spreading = {}, None
            self.are_replaced.set()
            self.are_replaced = asyncio.Event()
        report = {"requests": self.requests, "bytes": self.num_bytes, "faults": self.num_faults}
        report |= {"keys": sorted(self.keys), "expired": self.num_expired}
        answer = answer_of(json.dumps(report).encode())
        return answer.head + answer.body


def form_of(path: str) -> Message:
    """Return a request to an STS with the query of a path as a form, the only format that moto supports."""
    body = path.partition("?")[2].encode()
    head = "POST / HTTP/1.1\r\nHost: sts.amazonaws.com\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    return Message(f"{head}Content-Length: {len(body)}\r\n\r\n".encode(), body, True)


def answer_of(body: bytes, *, kind: str = "application/json") -> Message:
    """Return a response of the proxy itself."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return Message(head.encode(), body, True)


def error_answer(status: int, code: str, method: str = "GET") -> Message:
    """Return an error response of S3 or Google."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    head = f"HTTP/1.1 {status} Injected\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    # A body after a HEAD request would be taken for the response to the next request on the connection.
    return Message(head.encode(), b"" if method == "HEAD" else body, True)


async def _read_message(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None, *, of: str | None = None
) -> Message | None:
    """Read a request, or the response to a request with the method `of`; None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    begun_s = time.time()
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    stays_open = headers.get("connection", "").lower() != "close"
    if writer is not None and headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        head = re.sub(rb"(?i)\r\nexpect: *100-continue", b"", head)
    status = lines[0].split(" ")[1] if of is not None else ""
    if of == "HEAD" or status in ("204", "304"):
        return Message(head, b"", stays_open)
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
        head = re.sub(rb"(?i)\r\ntransfer-encoding: *chunked", b"\r\nContent-Length: %d" % len(body), head)
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif of is not None:
        body, stays_open = await reader.read(), False
    else:
        body = b""
    return Message(head, body, stays_open, begun_s)


async def serve(proxy: Proxy, certificates: Sequence[str] = ()) -> None:
    """Run a proxy until standard input closes; print its port."""
    tls = None
    for certificate in certificates:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate)
    server = await asyncio.start_server(proxy.connection, "127.0.0.1", 0, limit=2**20, backlog=512, ssl=tls)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(Proxy(int(sys.argv[1])), sys.argv[2:]))
