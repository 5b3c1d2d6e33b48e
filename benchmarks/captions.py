"""Throughput of `prep captions --endpoint` with a server that responds to each request after a fixed time.

    python -m benchmarks.captions [--chunks N] [--in-flight N ...] [--latency S] [--json FILE]

The server is a process that reads each request, waits (200 ms), and sends a response. It handles any number of requests
at a time, so with N requests in flight, the throughput is at most N / latency, the bound.

- `answers/s`: responses per second from the first request to the last response
- `steady`: the same without the first and the last fifth of the responses
- `of bound`: `steady` divided by the bound, which should be near 1
- `at the server`: mean number of requests that the server is handling
- `CPU ms`: CPU time per chunk of the command and its workers, without their start: the difference of two runs, of all
  and of a quarter of the chunks, divided by the difference of the numbers of chunks. It includes decoding, JPEG
  compression, the client, the journal and the shards.
- `start, CPU s`: the remaining CPU time: start of the command, and of its workers until their first request
- `its CPU ms`: CPU time of the server per chunk, on the same cores

Chunks have 1 s, 96 lines and 4 frames per request, so that a few cores can decode as fast as the bound requires, and
each video fills a shard.
"""

import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.measure import prep_command, run_measured
from benchmarks.report import parser_for, print_report

MODEL = "stub"
SECONDS = 256  # duration of a video
_ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "a shape moves"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 100, "completion_tokens": 3, "total_tokens": 103},
}


def serve(pipe: Connection, latency_s: float) -> None:
    """Respond to HTTP requests. For each object received from `pipe`, send the fields of `Seen`, and reset them."""
    content = json.dumps(_ANSWER).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    times: list[tuple[float, float]] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
                length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
                begin_s = time.monotonic()
                await reader.readexactly(length)
                await asyncio.sleep(latency_s)
                writer.write(head + content)
                times.append((begin_s, time.monotonic()))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0, backlog=1024)
        pipe.send(server.sockets[0].getsockname()[1])
        began_s = time.process_time()
        while await asyncio.to_thread(pipe.recv):
            pipe.send((times.copy(), time.process_time() - began_s))
            times.clear()
            began_s = time.process_time()

    asyncio.run(run())


@dataclass(frozen=True)
class Seen:
    """Record of the server about a run.

    Attributes:
        times: Times of arrival and response of each request, in seconds.
        cpu_s: CPU time of the server in seconds.
    """

    times: list[tuple[float, float]]
    cpu_s: float

    @property
    def wall_s(self) -> float:
        """Time from the first request to the last response, in seconds."""
        return max(end_s for _, end_s in self.times) - min(begin_s for begin_s, _ in self.times)

    def steady(self) -> float:
        """Return the responses per second, without the first and the last fifth of the responses."""
        ends_s = sorted(end_s for _, end_s in self.times)
        first, last = len(ends_s) // 5, len(ends_s) * 4 // 5
        return (last - first) / (ends_s[last] - ends_s[first])


def caption(data: Path, address: str, *, in_flight: int) -> tuple[int, float]:
    """Caption all chunks with a new prompt, and return the number of chunks and the CPU seconds."""
    flags = ("--endpoint", address, "--model", MODEL, "--frames", "4", "--prompt", f"{in_flight} at a time")
    engine = ("--engine", "processes", "--in-flight", str(in_flight), "--json")
    usage = run_measured(prep_command("captions", *flags, *engine, "--data", data))
    return json.loads(usage.stdout)["num_chunks"], usage.cpu_s


def measure(
    few: Path, all_: Path, address: str, seen: Callable[[], Seen], *, in_flight: int, latency_s: float
) -> dict[str, object]:
    """Caption the small and the complete set of chunks, and return a table row."""
    num_few, few_cpu_s = caption(few, address, in_flight=in_flight)
    seen()
    num_chunks, cpu_s = caption(all_, address, in_flight=in_flight)
    found = seen()
    if len(found.times) != num_chunks:
        raise RuntimeError(f"{len(found.times)} requests for {num_chunks} chunks")
    bound = in_flight / latency_s
    each_s = (cpu_s - few_cpu_s) / (num_chunks - num_few)
    return {
        "in flight": in_flight,
        "chunks": num_chunks,
        "bound, answers/s": bound,
        "answers/s": num_chunks / found.wall_s,
        "steady": found.steady(),
        "of bound": found.steady() / bound,
        "at the server": sum(end_s - begin_s for begin_s, end_s in found.times) / found.wall_s,
        "CPU ms": 1000 * each_s,
        "start, CPU s": cpu_s - each_s * num_chunks,
        "its CPU ms": 1000 * found.cpu_s / num_chunks,
    }


def make_chunks(data: Path, *, num_chunks: int) -> Path:
    """Make about `num_chunks` chunks of 1 s."""
    seconds = max(1, min(SECONDS, num_chunks))
    made = ("--videos", str(max(1, num_chunks // seconds)), "--minutes", str(seconds / 60))
    run_measured(prep_command("manifest", "synthetic", *made, "--data", data))
    small = ("--len", "1s", "--short-side", "96", "--preset", "ultrafast", "--engine", "processes")
    run_measured(prep_command("chunk", *small, "--data", data))
    return data


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--chunks", type=int, default=6144, help="approximate number of chunks (default 6144)")
    parser.add_argument(
        "--in-flight", type=int, nargs="+", default=[16, 64], help="numbers of requests (default 16 64)"
    )
    parser.add_argument("--latency", type=float, default=0.2, help="seconds until a response (default 0.2)")
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, arguments.latency), daemon=True)
    server.start()
    address = f"http://127.0.0.1:{ours.recv()}/v1"

    def seen() -> Seen:
        ours.send(True)
        return Seen(*ours.recv())

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        few = make_chunks(Path(folder) / "few", num_chunks=max(1, arguments.chunks // 4))
        all_ = make_chunks(Path(folder) / "all", num_chunks=arguments.chunks)
        for in_flight in arguments.in_flight:
            rows.append(measure(few, all_, address, seen, in_flight=in_flight, latency_s=arguments.latency))
    ours.send(False)
    server.join()
    notes = [f"The server responds after {arguments.latency:g} s."]
    print_report("prep captions with a server", rows, notes=notes, json_path=arguments.json)


if __name__ == "__main__":
    main()
