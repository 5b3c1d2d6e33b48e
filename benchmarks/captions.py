"""Throughput of `prep captions --endpoint` against a server that answers each request after a fixed time.

    python -m benchmarks.captions [--chunks N] [--in-flight N ...] [--latency S] [--json FILE]

The server is a process that reads each request, waits (200 ms), and sends an answer, any number at a time: with N
requests in flight, it answers N / latency requests a second at most, the bound. `answers/s` is what the command
reached, from the first request to the last answer; `of bound` should be near 1. `at the server` is the mean number of
requests that it had, `CPU ms` what the command and its workers took for each chunk, without the cost of a run with
nothing to do: the start of the workers, decoding, JPEG, the client, the journal and the shards. Chunks are of 1 s and
96 lines, with 4 frames each, so that few cores can decode as fast as the bound asks.
"""

import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.measure import prep_command, run_measured
from benchmarks.report import parser_for, print_report

MODEL = "stub"
MINUTES = 2
_ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "a shape moves"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 100, "completion_tokens": 3, "total_tokens": 103},
}


def serve(pipe: Connection, latency_s: float) -> None:
    """Answer requests; for each object that is received, send when they came and were answered, and forget them."""
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
        while await asyncio.to_thread(pipe.recv):
            pipe.send(times.copy())
            times.clear()

    asyncio.run(run())


def measure(
    data: Path, address: str, asked: Callable[[], list[tuple[float, float]]], *, in_flight: int, latency_s: float
) -> dict[str, object]:
    """Caption all chunks, with a prompt of their own."""
    flags = ("--endpoint", address, "--model", MODEL, "--frames", "4", "--prompt", f"{in_flight} at a time")
    engine = ("--engine", "processes", "--in-flight", str(in_flight), "--json")
    command = prep_command("captions", *flags, *engine, "--data", data)
    usage = run_measured(command)
    num_chunks = json.loads(usage.stdout)["num_chunks"]
    nothing = run_measured(command)
    times = asked()
    if len(times) != num_chunks:
        raise RuntimeError(f"{len(times)} requests for {num_chunks} chunks")
    wall_s = max(end_s for _, end_s in times) - min(begin_s for begin_s, _ in times)
    bound = in_flight / latency_s
    return {
        "in flight": in_flight,
        "chunks": num_chunks,
        "bound, answers/s": bound,
        "answers/s": num_chunks / wall_s,
        "of bound": num_chunks / wall_s / bound,
        "at the server": sum(end_s - begin_s for begin_s, end_s in times) / wall_s,
        "CPU ms": 1000 * max(0.0, usage.cpu_s - nothing.cpu_s) / num_chunks,
    }


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--chunks", type=int, default=1920, help="number of chunks, about (default 1920)")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[16, 64], help="requests (default 16 64)")
    parser.add_argument("--latency", type=float, default=0.2, help="seconds to an answer (default 0.2)")
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, arguments.latency), daemon=True)
    server.start()
    address = f"http://127.0.0.1:{ours.recv()}/v1"

    def asked() -> list[tuple[float, float]]:
        ours.send(True)
        found: list[tuple[float, float]] = ours.recv()
        return found

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        seconds = max(1, min(60 * MINUTES, arguments.chunks))
        videos = max(1, arguments.chunks // seconds)
        made = ("--videos", str(videos), "--minutes", str(seconds / 60))
        run_measured(prep_command("manifest", "synthetic", *made, "--data", data))
        small = ("--len", "1s", "--short-side", "96", "--preset", "ultrafast", "--engine", "processes")
        run_measured(prep_command("chunk", *small, "--data", data))
        for in_flight in arguments.in_flight:
            rows.append(measure(data, address, asked, in_flight=in_flight, latency_s=arguments.latency))
    ours.send(False)
    server.join()
    notes = [f"The server answers after {arguments.latency:g} s."]
    print_report("prep captions with a server", rows, notes=notes, json_path=arguments.json)


if __name__ == "__main__":
    main()
