"""Time and memory of `prep manifest ego4d` on millions of narrations, and of the rerun that finds the old ids again.

python -m benchmarks.manifest [--narrations 4000000] [--json FILE]
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from benchmarks.environment import REPOSITORY, surroundings

NARRATIONS_PER_VIDEO = 400
VERBS = ("picks", "opens", "closes", "washes", "cuts", "holds", "moves", "turns", "drops", "wipes")
NOUNS = ("the knife", "a red bowl", "the drawer", "the tap", "a piece of wood", "the phone", "a cloth", "the door")

# Run in a process of its own, so that its peak memory is that of the work alone.
WORK = """
import json, resource, sys, time
from pathlib import Path
begin_s = time.perf_counter()
from prep.manifest_commands import app
app(["ego4d", sys.argv[1], "--annotations", sys.argv[2], "--data", sys.argv[3]], result_action="return_value")
seconds = time.perf_counter() - begin_s
peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": round(seconds, 1), "peak_mib": peak_kib // 1024}))
"""


def write_narrations(path: Path, videos: Path, *, num_narrations: int) -> None:
    """Writes a file of the form of Ego4D's narration.json, and a one-byte file for each of its videos."""
    rng = random.Random(0)
    with path.open("w") as file:
        file.write('{"version": "v1", "videos": {')
        for video in range(max(1, num_narrations // NARRATIONS_PER_VIDEO)):
            uid = str(uuid.UUID(int=rng.getrandbits(128), version=4))
            (videos / f"{uid}.mp4").write_bytes(b"x")
            halves = {}
            for pass_number in (1, 2):
                time_s = 0.0
                narrations = []
                for _ in range(NARRATIONS_PER_VIDEO // 2):
                    time_s += rng.expovariate(1 / 4)
                    text = f"#C C {rng.choice(VERBS)} {rng.choice(NOUNS)} with the {rng.choice(('left', 'right'))} hand"
                    if rng.random() < 0.02:
                        text += " #unsure"
                    narrations.append(
                        {
                            "timestamp_sec": round(time_s, 4),
                            "timestamp_frame": int(time_s * 30),
                            "narration_text": text,
                            "annotation_uid": str(uuid.UUID(int=rng.getrandbits(128), version=4)),
                        }
                    )
                halves[f"narration_pass_{pass_number}"] = {"narrations": narrations, "summaries": []}
            file.write(("," if video else "") + json.dumps(uid) + ": " + json.dumps({"status": "complete", **halves}))
        file.write("}}")


def measure(videos: Path, annotations: Path, data: Path) -> dict[str, Any]:
    """Runs the command once; seconds and peak_mib."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", WORK, str(videos), str(annotations), str(data)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--narrations", type=int, default=4_000_000)
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        videos, annotations, data = (Path(folder) / name for name in ("videos", "narration.json", "data"))
        videos.mkdir()
        write_narrations(annotations, videos, num_narrations=arguments.narrations)
        result = {
            **surroundings(),
            "num_narrations": arguments.narrations,
            "annotations_mib": annotations.stat().st_size >> 20,
            "first": measure(videos, annotations, data),
            "rerun": measure(videos, annotations, data),
            "captions_parquet_mib": (data / "manifest" / "captions.parquet").stat().st_size >> 20,
        }
    print(f"{result['num_narrations']:,} narrations, {result['annotations_mib']} MiB of JSON")
    print(f"{result['machine']}; Python {result['python']}; commit {result['commit']}, {result['date']}\n")
    print("| run | seconds | peak MiB |\n|---|---|---|")
    for run in ("first", "rerun"):
        print(f"| {run} | {result[run]['seconds']} | {result[run]['peak_mib']} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
