"""Server with OpenAI's interface that sends scripted responses and logs its requests.

`python -m tests.prep.captions.server PORT_FILE` runs a server that describes the colour of the images, until it is
killed.
"""

import base64
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import numpy as np

MODEL = "stub-vl"


@dataclass(frozen=True)
class Request:
    """Request with its images [H, W, 3] in BGR and its other contents."""

    pictures: list[np.ndarray]
    prompt: str
    body: dict[str, Any]
    key: str

    @property
    def tokens(self) -> int:
        """Number of tokens that the server reports for the request."""
        return 10 * len(self.pictures) + len(self.prompt.split())


def completion(text: str | None, request: Request, **changes: Any) -> dict[str, Any]:
    """Return a response as a server sends it.

    `changes` apply to the choice (`refusal`, `finish_reason`) or to the complete response.
    """
    message = {"role": "assistant", "content": text, "refusal": changes.pop("refusal", None)}
    choice = {"index": 0, "message": message, "finish_reason": changes.pop("finish_reason", "stop")}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": request.body["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": request.tokens,
            "completion_tokens": len((text or "").split()),
            "total_tokens": request.tokens + len((text or "").split()),
        },
        **changes,
    }


Reply = dict[str, Any] | int | bytes | None  # JSON object; status; raw bytes; None closes the connection
Script = Callable[[Request, int], Reply]


def describe_pictures(request: Request, number: int) -> Reply:
    """Return a caption that depends only on the images."""
    mean = np.mean([picture.mean() for picture in request.pictures])
    return completion(f"{len(request.pictures)} frames of brightness {mean:.0f}", request)


@dataclass
class Server:
    """Running server."""

    script: Script = describe_pictures
    seconds: float = 0.0
    log: list[Request] = field(default_factory=list)
    most_at_once: int = 0
    address: str = ""

    def begin(self, port: int = 0) -> ThreadingHTTPServer:
        """Start to serve in a thread."""
        server, lock, running = self, threading.Lock(), [0]

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                request = _parse_request(body, self.headers.get("Authorization", "").removeprefix("Bearer "))
                with lock:
                    server.log.append(request)
                    number = len(server.log) - 1
                    running[0] += 1
                    server.most_at_once = max(server.most_at_once, running[0])
                try:
                    time.sleep(server.seconds)
                    self._send(server.script(request, number))
                finally:
                    with lock:
                        running[0] -= 1

            def _send(self, reply: Reply) -> None:
                if reply is None:
                    self.close_connection = True
                    return
                status = reply if isinstance(reply, int) else 200
                if isinstance(reply, int):
                    reply = {"error": {"message": f"status {reply} for the key {self.headers['Authorization']}"}}
                content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                with suppress(BrokenPipeError, ConnectionResetError):
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

        class Quick(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256
            allow_reuse_address = True

        http = Quick(("127.0.0.1", port), Handler)
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.address = f"http://127.0.0.1:{http.server_port}/v1"
        return http


def _parse_request(body: dict[str, Any], key: str) -> Request:
    (message,) = body["messages"]
    pictures = [
        cv2.imdecode(np.frombuffer(base64.b64decode(part["image_url"]["url"].partition(",")[2]), np.uint8), 1)
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    (prompt,) = (part["text"] for part in message["content"] if part["type"] == "text")
    return Request([picture for picture in pictures if picture is not None], prompt, body, key)


@contextmanager
def run_server(script: Script = describe_pictures, *, seconds: float = 0.0) -> Iterator[Server]:
    """Run a server within the block."""
    server = Server(script, seconds)
    http = server.begin()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()


if __name__ == "__main__":
    server = Server()
    server.begin()
    Path(sys.argv[1]).write_text(server.address)
    threading.Event().wait()
