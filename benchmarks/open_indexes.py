"""The cost of keeping the indexes of many shards open: memory and CPU time of visiting shards at random.

    python -m benchmarks.open_indexes [--shards 70000] [--kept 4096 24576] [--folder DIR] [--json FILE]

The data are made (benchmarks.open_data) with four chunks a shard. Every shard is visited in random order, as
training does for a clip: its packet tables are opened if they are not, and those of one chunk are looked up. A tenth is
then visited again. `kept` is the number of shards that a variant keeps (shards.reader), `private` is anonymous memory
beyond that of the opened variant, and `maps` the number of mapped indexes at the end. Each row is a process of its own.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.environment import REPOSITORY
from benchmarks.report import parser_for, print_report

CHUNKS_PER_SHARD = 4


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--shards", type=int, default=70_000)
    parser.add_argument("--kept", type=int, nargs="+", default=[4096, 24_576])
    parser.add_argument("--folder", type=Path, help="where to write the data; default: the system's temporary folder")
    parser.add_argument("--visit", nargs=2, metavar=("DATA", "KEPT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.visit:
        visit(Path(arguments.visit[0]), kept=int(arguments.visit[1]))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        make(Path(name), num_shards=arguments.shards)
        for kept in arguments.kept:
            command = [sys.executable, "-m", "benchmarks.open_indexes", "--visit", name, str(kept)]
            found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
            rows.append({"shards": arguments.shards, "kept": kept, **json.loads(found.stdout.splitlines()[-1])})
            print(rows[-1], file=sys.stderr, flush=True)
    print_report("Indexes of many shards", rows, notes=[], json_path=arguments.json)


def make(data: Path, *, num_shards: int) -> None:
    """Write the data folder."""
    from benchmarks.open_data import write_column, write_manifest_of

    num_chunks = num_shards * CHUNKS_PER_SHARD
    write_manifest_of(data, num_chunks=num_chunks, num_captions=1)
    write_column(data, "video", num_chunks=num_chunks, has_indexes=True, chunks_per_shard=CHUNKS_PER_SHARD)


def visit(data: Path, *, kept: int) -> None:
    """Visit all shards and then a tenth of them again, and print what it took."""
    import numpy as np

    from shards import reader
    from shards.reader import Variant

    reader.MAX_KEPT_SHARDS = kept
    begin_s = time.process_time()
    variant = Variant.open(data).whole()
    shard_ids = np.array(variant.commits)
    opened_s, base_mb = time.process_time() - begin_s, _anonymous_mb()
    visit_us = []
    for seed, count in enumerate((len(shard_ids), -(-len(shard_ids) // 10))):
        begin_s = time.process_time()
        for shard_id in np.random.default_rng(seed).permutation(shard_ids)[:count].tolist():
            tables = variant.shard(shard_id).packet_tables
            tables.of_row(0)
            tables.payload(0)
        visit_us.append(round(1e6 * (time.process_time() - begin_s) / count))
    maps = Path("/proc/self/maps").read_text().count(".index.arrow")
    found = {"opening CPU s": round(opened_s, 2), "first visit us": visit_us[0], "second visit us": visit_us[1]}
    found |= {"private MB": round(_anonymous_mb() - base_mb), "maps": maps, "load": round(os.getloadavg()[0])}
    print(json.dumps(found))


def _anonymous_mb() -> float:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


if __name__ == "__main__":
    main()
