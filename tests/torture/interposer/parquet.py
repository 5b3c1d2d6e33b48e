"""Patch that makes Arrow's Parquet writer write through an intercepted Python file."""

import importlib.abc
import importlib.machinery
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Sink:
    """Unbuffered file object for Arrow's Parquet writer: like Arrow's own, it writes to disk at once."""

    def __init__(self, path: Any) -> None:
        self._file = open(path, "wb")  # noqa: PTH123, SIM115 - closed with the writer

    def write(self, content: Any) -> int:
        num_bytes = self._file.write(content)
        self._file.flush()
        return num_bytes

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def write_through(module: ModuleType) -> None:
    """Make `ParquetWriter` open its files as `_Sink` objects."""
    real_init, real_close = module.ParquetWriter.__init__, module.ParquetWriter.close

    def init(self: Any, where: Any, *arguments: Any, **named: Any) -> None:
        self.torture_sink = None
        if isinstance(where, (str, os.PathLike)):
            self.torture_sink = where = _Sink(where)
        real_init(self, where, *arguments, **named)

    def close(self: Any) -> None:
        try:
            real_close(self)
        finally:
            if self.torture_sink is not None:
                self.torture_sink.close()

    module.ParquetWriter.__init__, module.ParquetWriter.close = init, close


class Later(importlib.abc.MetaPathFinder):
    """Import hook that finds pyarrow.parquet.core as usual, and patches it after import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "pyarrow.parquet.core":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_watch(module: ModuleType) -> None:
                run(module)
                write_through(module)

            spec.loader.exec_module = run_and_watch  # type: ignore[method-assign]
        return spec
