"""HTTP server of one folder, with range requests, listings, and failures on demand."""

import http.server
import re
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any


class HttpFolder:
    """HTTP server that serves a folder until it is closed.

    Attributes:
        address: URL of the folder.
        num_failures: Number of further requests for each path that fail with status 503.
        cut: Paths whose response is shorter than its announced length.
        without_ranges: Paths that are sent complete, even in response to a range request.
        hanging: Paths whose response stops after half of the bytes. The server sets `has_hung` when that happens.
        redirects: Redirect target of each redirected path.
        num_bytes: Number of bytes sent so far, by path.
    """

    def __init__(self, folder: Path) -> None:
        self.num_failures: Counter[str] = Counter()
        self.cut: set[str] = set()
        self.without_ranges: set[str] = set()
        self.hanging: set[str] = set()
        self.has_hung = threading.Event()
        self.redirects: dict[str, str] = {}
        self.num_bytes: Counter[str] = Counter()
        self.counting = threading.Lock()  # each request runs in its own thread
        handler = partial(_Handler, self, directory=str(folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, folder: HttpFolder, *arguments: Any, **options: Any) -> None:
        self._folder = folder
        super().__init__(*arguments, **options)

    def send_head(self) -> Any:
        """Handle HEAD requests and listings."""
        return None if self._redirect() else super().send_head()

    def _redirect(self) -> bool:
        target = self._folder.redirects.get(self.path)
        if target is not None:
            self.send_response(302)
            self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()
        return target is not None

    def do_GET(self) -> None:
        folder = self._folder
        if self._redirect():
            return
        with folder.counting:
            fails = folder.num_failures[self.path] > 0
            folder.num_failures[self.path] -= fails
        if fails:
            self.send_error(503)
            return
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            super().do_GET()  # a listing, or status 404
            return
        content = path.read_bytes()
        begin, end, status = 0, len(content), 200
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if byte_range and self.path not in folder.without_ranges:
            begin, end, status = int(byte_range[1]), min(int(byte_range[2]) + 1, len(content)), 206
        part = content[begin:end]
        self.send_response(status)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        if self.path in folder.cut:
            part = part[: len(part) // 2]
        with folder.counting:
            folder.num_bytes[self.path] += len(part)  # count before the client can close the connection
        self.end_headers()
        if self.path in folder.hanging:
            self.wfile.write(part[: len(part) // 2])
            folder.has_hung.set()
            self.connection.recv(1)  # wait until the client closes the connection
            return
        self.wfile.write(part)
        self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        pass
