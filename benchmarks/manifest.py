"""Time and memory of `prep manifest ego4d` with millions of narrations, in a first run and in a run that matches IDs.

    python -m benchmarks.manifest [--narrations N] [--json FILE]

The narrations are generated, in the format of Ego4D's narration.json. `peak MB` is the peak resident memory of the
command, including shared libraries. Targets for each run: under 60 s and 1 GB.
"""

import json
import random
import tempfile
import uuid
from pathlib import Path

from benchmarks.measure import prep_command, run_measured
from benchmarks.report import parser_for, print_report

NARRATIONS_PER_VIDEO = 400
VERBS = ("picks", "opens", "closes", "washes", "cuts", "holds", "moves", "turns", "drops", "wipes")
NOUNS = ("the knife", "a red bowl", "the drawer", "the tap", "a piece of wood", "the phone", "a cloth", "the door")


def write_narrations(path: Path, videos: Path, *, num_narrations: int) -> None:
    """Write narrations in the format of Ego4D's narration.json, and a one-byte file for each of the videos."""
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


def measure(run: str, *, videos: Path, annotations: Path, data: Path) -> dict[str, object]:
    """Run the command once, and return a table row."""
    command = prep_command("manifest", "ego4d", videos, "--annotations", annotations, "--data", data, "--json")
    usage = run_measured(command)
    summary = json.loads(usage.stdout)
    return {
        "run": run,
        "captions": summary["num_captions"],
        "new captions": summary["num_captions_added"],
        "JSON MB": annotations.stat().st_size // 1_000_000,
        "wall s": usage.wall_s,
        "cpu s": usage.cpu_s,
        "peak MB": usage.peak_bytes // 1_000_000,
    }


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument(
        "--narrations", type=int, default=4_000_000, metavar="N", help="number of narrations (default: %(default)s)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        videos, annotations, data = (Path(folder) / name for name in ("videos", "narration.json", "data"))
        videos.mkdir()
        write_narrations(annotations, videos, num_narrations=arguments.narrations)
        rows = [measure(run, videos=videos, annotations=annotations, data=data) for run in ("first", "rerun")]
    print_report(
        "prep manifest ego4d", rows, notes=["Targets: under 60 s and 1,000 MB each."], json_path=arguments.json
    )


if __name__ == "__main__":
    main()
