"""Flags for monitoring long commands: metrics for Prometheus, and a log of JSON lines.

Metrics are served by prometheus-client, which is imported only if a port is set. A program adds its metrics to the
registry from `metrics_registry`. For a log of JSON lines, a `JsonLog` replaces standard error, and writes each line as
an object with the time in UTC, the level, the node, the rank if a launcher has set it, and the line as the event.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import TracebackType
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.help_text import RARE
from clipmill.manifests.progress import is_first_process, log_time
from clipmill.manifests.settings import Checked, Range

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_MONITORING = Parameter(group=Group("Monitoring", sort_key=18.5))
# Levels of lines that begin with these words. All other lines have the level "info".
_LEVELS = {"error": "error", "failed": "error", "hint": "error"}
_LEVELS |= {"warning": "warning", "stopped": "warning", "interrupted": "warning"}
_FIRST_WORD = re.compile(r"(\w+)[:;] ")
_registry: "CollectorRegistry | None" = None  # registry of the metrics that are being served


@dataclass(frozen=True, kw_only=True)
class Monitoring(Checked):
    """Settings for monitoring a command. They do not affect its results."""

    metrics_port: Annotated[int | None, _MONITORING, RARE, Range(0, 65_535)] = None
    """Port on which to serve metrics for Prometheus while the command runs, on all network interfaces; 0 selects a free
    port, which is printed. The first rank serves the metrics of all ranks. Default: no metrics."""
    log_format: Annotated[Literal["plain", "json"], _MONITORING, RARE] = "plain"
    """Format of the log on standard error. json: one object per line, with time, level, node and event."""

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Context manager that sets the format of this process's log, and serves metrics until the block ends.

        The log keeps its format after the block.

        Raises:
            UserError: The port cannot be used.
        """
        global _registry
        if self.log_format == "json":
            sys.stderr = JsonLog(sys.stderr)
            sys.excepthook = sys.stderr.write_exception
        if self.metrics_port is None or not is_first_process():
            yield
            return
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        try:
            server, thread = start_http_server(self.metrics_port, registry=registry)
        except OSError as error:
            raise UserError(
                f"--metrics-port {self.metrics_port} cannot be used: {error.strerror}",
                hint="use a different port for each command on a node, or --metrics-port 0 for a free port",
                flags=("--metrics-port",),
            ) from None
        sys.stderr.write(f"metrics are served on port {server.server_port}, path /metrics\n")
        _registry = registry
        try:
            yield
        finally:
            _registry = None
            server.shutdown()
            server.server_close()
            thread.join()


def metrics_registry() -> "CollectorRegistry | None":
    """Return the registry of the metrics that this process serves, or None if it serves no metrics."""
    return _registry


class JsonLog:
    """Text stream that writes each line as a JSON object to another stream."""

    has_times = True  # read by `progress.line_time`, which then adds no times

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._partial_lines: dict[int, str] = {}  # unfinished lines by thread
        self._origin = {"node": os.uname().nodename}
        if "RANK" in os.environ:
            self._origin["rank"] = os.environ["RANK"]

    def write(self, text: str) -> int:
        """Write an object for each line that `text` completes, and return the length of `text`."""
        *lines, rest = (self._partial_lines.pop(get_ident(), "") + text).split("\n")
        if rest:
            self._partial_lines[get_ident()] = rest
        for line in filter(str.strip, lines):
            word = _FIRST_WORD.match(line)
            self._write_event(_LEVELS.get(word[1], "info") if word else "info", line)
        return len(text)

    def write_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Write a traceback as one object. This method can replace `sys.excepthook`."""
        self._write_event("error", "".join(traceback.format_exception(kind, error, trace)).rstrip())

    def isatty(self) -> bool:
        """Return False, so that progress is written as lines."""
        return False

    def _write_event(self, level: str, event: str) -> None:
        line = {"time": log_time(), "level": level, **self._origin, "event": event}
        self._stream.write(f"{json.dumps(line)}\n")
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
