"""Object storage: the cost of a request, and of a data folder in a bucket compared with a local folder.

    python -m benchmarks.object_storage [--requests N] [--videos N] [--rounds N] [--latency-ms MS] [--json FILE]

moto's S3 server runs on this machine, behind a proxy that counts requests and adds latency. There are two tables:

- Objects of 190 kB (a chunk of 15 s) are read one after another with clipmill's client (obstore), boto3 and s3fs:
  requests and CPU ms of the client per object. The clients take turns. `make peers` installs boto3 and s3fs; the rows
  of missing clients are omitted.
- `prep chunk` encodes synthetic videos of half a minute into a local folder, into a bucket, and into a bucket with
  latency: CPU s and wall s of the command with its workers, and the traffic through the proxy. `nothing to do` is a
  second run of the same command.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import Usage, prep_command, run_measured
from benchmarks.peer_process import PEERS_PYTHON, NotInstalled, PeerProcess
from benchmarks.report import parser_for, print_report
from clipmill.manifests.storage.objects import open_objects
from tests.object_storage.faults import Faults, faulty
from tests.object_storage.server import S3Server, s3_server

OBJECT_BYTES = 190_000
NUM_OBJECTS = 50
BUCKET = "benchmark"
NUM_WORKERS = 2
LEN = ("--len", "500ms", "--preset", "ultrafast", "--short-side", "96")


@contextmanager
def storage() -> Iterator[tuple[S3Server, Faults]]:
    """Start a server and a proxy within the block, and set the environment variables for clients."""
    with s3_server() as server, faulty(server.port) as proxy:
        before = dict(os.environ)
        os.environ.update(server.environment(endpoint=proxy.endpoint))
        try:
            yield server, proxy
        finally:
            os.environ.clear()
            os.environ.update(before)


def measure_clients(proxy: Faults, *, num_requests: int, num_rounds: int, folder: Path) -> tuple[list[Any], list[str]]:
    """Return a table row for each installed client, and a note about each missing client."""
    objects = open_objects(f"s3://{BUCKET}")
    keys = [f"objects/{number:04d}" for number in range(NUM_OBJECTS)]
    for key in keys:
        objects.write(key, os.urandom(OBJECT_BYTES))
    asked = [keys[number % NUM_OBJECTS] for number in range(num_requests)]
    peers: dict[str, PeerProcess] = {}
    notes = []
    ours = Path(sys.executable)
    for name, pythons in (("clipmill", [ours]), ("boto3", [ours, PEERS_PYTHON]), ("s3fs", [ours, PEERS_PYTHON])):
        for python in pythons:
            try:
                peer = PeerProcess(python, "benchmarks.object_storage_peers", name, BUCKET, folder=folder)
            except NotInstalled as missing:
                why = str(missing)
                continue
            try:
                peer.ask("get", keys=keys[:2])
            except NotInstalled as missing:
                why = str(missing)
                peer.end()
                continue
            peers[name] = peer
            break
        else:
            notes.append(f"{name}: not measured ({why}).")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    for _ in range(num_rounds):
        for name, peer in peers.items():
            proxy.set()
            answer = peer.ask("get", keys=asked)
            if answer["bytes"] != num_requests * OBJECT_BYTES:
                raise RuntimeError(f"{name} read {answer['bytes']} bytes")
            found[name].append({**answer, "requests": len(proxy.seen().requests)})
    for peer in peers.values():
        peer.end()
    rows = [
        {
            "client": name,
            "requests per object": rounds[0]["requests"] / num_requests,
            "CPU ms per object": statistics.median(one["cpu_s"] for one in rounds) / num_requests * 1000,
            "wall ms per object": statistics.median(one["seconds"] for one in rounds) / num_requests * 1000,
        }
        for name, rounds in found.items()
    ]
    return rows, notes


def measure_prep(
    proxy: Faults, *, num_videos: int, num_rounds: int, latency_s: float, folder: Path
) -> list[dict[str, object]]:
    """Return the table rows of `prep chunk`."""
    places = {
        "local": (None, 0.0),
        "bucket": (f"s3://{BUCKET}/data", 0.0),
        f"bucket, {latency_s * 1000:.0f} ms": (f"s3://{BUCKET}/far", latency_s),
    }
    results: dict[tuple[str, str], list[tuple[Usage, int, int]]] = {}
    num_shards = 0
    for number in range(num_rounds):
        for place, (address, delay_s) in places.items():
            data = str(folder / f"data-{number}") if address is None else f"{address}-{number}"
            made = ("--videos", str(num_videos), "--minutes", "0.5", "--out", folder / "videos", "--data", data)
            run_measured(prep_command("manifest", "synthetic", *made))
            chunk = prep_command(
                "chunk", *LEN, "--engine", "processes", "--workers", str(NUM_WORKERS), "--data", data, "--json"
            )
            for what in ("all to do", "nothing to do"):
                proxy.set(latency_s=delay_s)
                usage = run_measured(chunk)
                seen = proxy.seen()
                num_shards = json.loads(usage.stdout)["num_shards"]
                results.setdefault((place, what), []).append((usage, len(seen.requests), seen.num_bytes))
        shutil.rmtree(folder / f"data-{number}")
    return [
        {
            "data folder": place,
            "work": what,
            "shards": num_shards,
            "CPU s": statistics.median(usage.cpu_s for usage, _, _ in rounds),
            "wall s": statistics.median(usage.wall_s for usage, _, _ in rounds),
            "requests": int(statistics.median(requests for _, requests, _ in rounds)),
            "kB sent and received": int(statistics.median(num_bytes for _, _, num_bytes in rounds)) // 1000,
        }
        for (place, what), rounds in results.items()
    ]


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--requests", type=int, default=1000, help="number of objects per client (default 1000)")
    parser.add_argument("--videos", type=int, default=16, help="number of synthetic videos (default 16)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default 3)")
    parser.add_argument("--latency-ms", type=float, default=50.0, help="latency of a response in ms (default 50)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, storage() as (server, proxy):
        folder = Path(name)
        server.make_bucket(BUCKET)
        clients, notes = measure_clients(
            proxy, num_requests=arguments.requests, num_rounds=arguments.rounds, folder=folder
        )
        prep = measure_prep(
            proxy,
            num_videos=arguments.videos,
            num_rounds=arguments.rounds,
            latency_s=arguments.latency_ms / 1000,
            folder=folder,
        )
    print_report(
        f"Reading objects of {OBJECT_BYTES // 1000} kB",
        clients,
        notes=[f"Median of {arguments.rounds} rounds.", *notes],
        json_path=arguments.json,
        further={"prep chunk with a data folder in a bucket": prep},
    )


if __name__ == "__main__":
    main()
