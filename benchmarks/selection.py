"""Cost of `--where` and of finding near duplicates, by number of chunks.

    python -m benchmarks.selection [--chunks 1000000 10000000] [--rounds 3] [--folder DIR] [--json FILE]

The merged table of scores is generated, with random values and 20 chunks per video. 1 % of the chunks are copies of
other chunks with up to two flipped bits in the hash. Each figure is the cost of a new process after its imports, as the
median of the rounds, in which the variants take turns.

`parse and mask` parses the expression and evaluates it on the table, which is mapped into memory. `selected chunks`
does the work of a training run: it opens the table, verifies the checksums of the columns in use, finds the rows of the
chunks, reads the fields of their videos in the manifest, and evaluates the expression. `near duplicates` writes the
merged table. Peak memory is the peak of the process, including mapped pages of the table. `baseline` only imports the
same modules.
"""

import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb  # noqa: F401 - otherwise, the first expression would import duckdb
import numpy as np
import pyarrow as pa

from benchmarks.measure import run_measured
from benchmarks.report import parser_for, print_report
from clipmill.manifests.publish import publish_json
from clipmill.manifests.write import write_manifest
from clipmill.shards.columns import SCORES
from clipmill.shards.commits import Commit, write_commit
from clipmill.shards.dataset import set_current_variant, variant_dir
from clipmill.shards.reader import Variant
from clipmill.shards.score_fields import SCORES_FIELDS
from clipmill.shards.scores import CHUNKS_FILE, open_scores, write_score_table
from clipmill.shards.selection import selected_chunks
from clipmill.shards.where import parse_where

VARIANT = "scores-00000000"
CHUNKS_PER_VIDEO = 20
EXPRESSIONS = {
    "short": "motion > 0.2 and cuts = 0 and not duplicate",
    "long": "motion > 0.1 and motion < 3 and camera_motion / (motion + 0.01) < 0.9 and sharpness > 50 and "
    "not duplicate and (speech is null or speech < 0.5) and cuts in (0, 1, 2) and begin_s >= 15"
    " and dataset = 'made' and split != 'test'",
}
PHASES = ("baseline", "parse and mask", "selected chunks")
DUPLICATES = "near duplicates"


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--chunks", type=int, nargs="+", default=[10**6, 10**7])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder for the data (default: the system's temporary folder)")
    parser.add_argument(
        "--turn", nargs=3, metavar=("FOLDER", "PHASE", "EXPRESSION"), help="run one turn; used for the new processes"
    )
    arguments = parser.parse_args()
    if arguments.turn:
        folder, phase, expression = arguments.turn
        print(json.dumps(turn(Path(folder), phase, expression)))
        return
    rows = []
    for num_chunks in arguments.chunks:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            rows += race(Path(name), num_chunks, num_rounds=arguments.rounds)
    print_report(
        "Selection by an expression",
        rows,
        notes=["Target: `--where` over 10 million chunks below 5 CPU s."],
        json_path=arguments.json,
    )


def race(folder: Path, num_chunks: int, *, num_rounds: int) -> list[dict[str, object]]:
    """Return the table rows for a number of chunks."""
    rows_path = folder / "rows.arrow"
    write_data(folder, rows_path, num_chunks)
    turns: dict[tuple[str, str], list[dict[str, Any]]] = {(DUPLICATES, ""): []}
    turns |= {(phase, name): [] for phase in PHASES for name in EXPRESSIONS if phase != "baseline" or name == "short"}
    for number in range(num_rounds):
        for phase, name in turns:
            if phase == DUPLICATES and number:
                continue  # one round is enough: it takes as long as all other measurements together
            usage = run_measured(
                [sys.executable, "-m", "benchmarks.selection", "--turn", str(folder), phase, EXPRESSIONS.get(name, "")]
            )
            found = json.loads(usage.stdout.splitlines()[-1])
            turns[phase, name].append(found)
            print(f"{num_chunks:,} chunks, round {number + 1}, {phase} {name}: {found}", file=sys.stderr, flush=True)
    return [
        {
            "chunks": num_chunks,
            "what": phase,
            "expression": name,
            "selected": found[0]["selected"],
            "CPU s": statistics.median(one["cpu_s"] for one in found),
            "peak MB": round(statistics.median(one["peak_mb"] for one in found)),
        }
        for (phase, name), found in turns.items()
    ]


def turn(folder: Path, phase: str, expression: str) -> dict[str, Any]:
    """Run a phase, and return the number of selected (or duplicate) chunks, the CPU seconds and the peak memory."""
    selected, begin_s = None, time.process_time()
    if phase == "parse and mask":
        # Fields of videos are columns of the manifest. The table has only the fields of chunks.
        where = parse_where(expression.partition(" and dataset")[0])
        table = pa.ipc.open_file(pa.memory_map(str(folder / SCORES / VARIANT / CHUNKS_FILE))).read_all()
        selected = int(where.mask(table).sum())
    elif phase == "selected chunks":
        table = pa.ipc.open_file(pa.memory_map(str(folder / SCORES / VARIANT / CHUNKS_FILE))).read_all()
        coded = table["video_id"].chunk(0)
        video_row, start_ms = coded.indices.to_numpy(), table["start_ms"].to_numpy()
        begin_s = time.process_time()
        where = parse_where(expression)
        mask = selected_chunks(where, folder, video_ids=coded.dictionary, video_row=video_row, start_ms=start_ms)
        selected = int(mask.sum())
    elif phase == DUPLICATES:
        rows = pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow"))).read_all()
        begin_s = time.process_time()
        write_score_table(Variant(folder / SCORES / VARIANT), rows)
        took_s = time.process_time() - begin_s
        selected = int((open_scores(folder).table["duplicate_of"].to_numpy() >= 0).sum())
        begin_s = time.process_time() - took_s
    cpu_s = time.process_time() - begin_s
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"selected": selected, "cpu_s": round(cpu_s, 3), "peak_mb": round(peak_mb)}


def write_data(folder: Path, rows_path: Path, num_chunks: int) -> None:
    """Write a manifest, a variant of scores without shards, and the rows of its merged table."""
    draw = np.random.default_rng(0)
    num_videos = -(-num_chunks // CHUNKS_PER_VIDEO)
    names = pa.array([f"video-{number:08d}" for number in range(num_videos)])
    split = pa.array(["val" if number % 20 == 0 else "train" for number in range(num_videos)])
    videos = {"video_id": names, "source_id": names, "path": names, "split": split}
    no_captions = {
        "video_id": pa.array([], pa.string()).dictionary_encode(),
        "begin_s": pa.array([], pa.float64()),
        "end_s": pa.array([], pa.float64()),
        "text": pa.array([], pa.string()),
        "source": pa.array([], pa.string()).dictionary_encode(),
    }
    write_manifest(folder, "made", pa.table(videos), pa.table(no_captions))
    directory = variant_dir(folder, SCORES, VARIANT)
    directory.mkdir(parents=True)
    publish_json(directory / "recipe.json", {"column": SCORES, "schema": 1})
    write_commit(directory, Commit(SCORES, 0, "train", "00" * 32, None, ()))
    set_current_variant(folder, SCORES, VARIANT)

    number = np.arange(num_chunks)
    hashes = draw.integers(0, 1 << 64, num_chunks, np.uint64)
    copies = draw.choice(num_chunks, num_chunks // 100, replace=False)
    flips = np.uint64(1) << draw.integers(0, 64, (2, len(copies)), np.uint64)
    hashes[copies] = hashes[draw.integers(0, num_chunks, len(copies))] ^ flips[0] ^ flips[1]

    def share() -> np.ndarray:
        return draw.random(num_chunks, np.float32)

    codes = pa.array((number // CHUNKS_PER_VIDEO).astype(np.int32))
    columns: dict[str, Any] = {
        "video_id": pa.DictionaryArray.from_arrays(codes, names),
        "start_ms": number % CHUNKS_PER_VIDEO * 15000,
        "motion": share() * 2,
        "camera_motion": share(),
        "object_motion": share(),
        "sharpness": share() * 1000,
        "brightness": share(),
        "black": share(),
        "frozen": share(),
        "letterbox": share(),
        "cuts": draw.integers(0, 4, num_chunks, np.int32),
        "cut_times_s": pa.array([], pa.list_(pa.float32())),
        "speech": pa.array(share(), mask=draw.random(num_chunks) < 0.3),
        "phash": hashes,
    }
    columns["cut_times_s"] = pa.ListArray.from_arrays(
        np.concatenate([[0], np.cumsum(columns["cuts"])]).astype(np.int32),
        draw.random(columns["cuts"].sum(), np.float32),
    )
    names_in_order = [field.name for field in SCORES_FIELDS if field.name in columns]
    table = pa.table({name: columns[name] for name in names_in_order})
    with pa.ipc.new_file(rows_path, table.schema) as writer:
        for batch in table.to_batches():
            writer.write_batch(batch)


if __name__ == "__main__":
    main()
