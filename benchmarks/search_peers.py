"""Program of the searches that `benchmarks.search` compares: `search_peers FOLDER clipmill|faiss`.

    {"do": "open"}                       read the data that must be in memory: {"seconds": ...}
    {"do": "search", "queries": 1}       best 10 rows for the first queries: {"rows": ..., "seconds": ..., "cpu_s": ...}
    {"do": "memory"}                     {"peak_bytes": ...}

Each search runs in a separate process. faiss is in the environment of `make peers`, without clipmill;
`clipmill.train.search.nearest` needs only NumPy.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_process import answer_requests

TOP = 10
Search = Callable[[np.ndarray], np.ndarray]


def open_clipmill(folder: Path) -> Search:
    """Return a search function that reads the file in blocks."""
    from clipmill.train.search.nearest import find_nearest

    return lambda queries: find_nearest(folder / "video.npy", queries, count=TOP).row_QK


def open_faiss(folder: Path) -> Search:
    """Return a search function with an index that holds all rows in memory."""
    import faiss

    rows = np.load(folder / "video.npy", mmap_mode="r")
    index = faiss.IndexFlatIP(rows.shape[1])
    # `add` would take up to twice the memory while the index grows.
    index.codes.resize(rows.nbytes)
    index.ntotal = len(rows)
    own = faiss.rev_swig_ptr(index.get_xb(), rows.size)
    with (folder / "video.npy").open("rb", buffering=0) as file:
        file.seek(rows.offset)
        filled = 0
        while filled < rows.nbytes:
            filled += file.readinto(own.view(np.uint8)[filled:])
    return lambda queries: np.asarray(index.search(queries, TOP)[1])


class _Peer:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._open = folder, {"clipmill": open_clipmill, "faiss": open_faiss}[name]
        self._search: Search | None = None
        self._queries = np.load(folder / "queries.npy")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        if request["do"] == "open":
            self._search = self._open(self._folder)
            return {"seconds": time.perf_counter() - began_s}
        if request["do"] == "search":
            assert self._search is not None
            rows = self._search(self._queries[: request["queries"]]).tolist()
            return {
                "rows": rows,
                "seconds": time.perf_counter() - began_s,
                "cpu_s": time.process_time() - cpu_s,
            }
        # The peak from getrusage would include the memory of the process that started this process.
        (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return {"peak_bytes": 1024 * int(peak.split()[1])}


def main() -> None:
    """Respond to requests until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=("clipmill", "faiss"))
    arguments = parser.parse_args()
    answer_requests(_Peer(arguments.folder, arguments.name).answer)


if __name__ == "__main__":
    main()
