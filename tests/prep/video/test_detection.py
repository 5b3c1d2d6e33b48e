"""Tests of shot detection for `prep chunk --cut shots`: its failures, its engines, and leftovers of a kill."""

import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from clipmill.prep.engines.processes import ProcessEngine
from clipmill.prep.sources.access import source_fingerprint
from clipmill.prep.sources.shot_table import SHOTS, ShotTask, detect_shots, read_shots
from clipmill.prep.sources.table import PROBES
from clipmill.prep.video.column import Recipe, resolve
from clipmill.prep.video.plan_inputs import add_missing_shots, chunk_job, make_plan
from clipmill.prep.video.spans import detector_key, shots_of
from tests.conftest import ROOT
from tests.prep.here import Here
from tests.prep.running import contents, manifest
from tests.prep.scenes import RECIPE, run_here, write_scenes


def test_failures_of_a_detection_have_the_names_of_failures_of_sources(tmp_path: Path) -> None:
    videos, data = tmp_path / "videos", tmp_path / "data"
    for number, name in enumerate(("gone", "replaced", "well")):
        write_scenes(videos / f"{name}.mp4", [30 + number, 40])
    manifest(data, videos)
    planned = make_plan(data, RECIPE)
    (videos / "gone.mp4").unlink()
    write_scenes(videos / "replaced.mp4", [30, 30])
    after = add_missing_shots(planned, Here())
    failures = {failure.video_id: failure.code for failure in chunk_job(after).planning_failures}
    assert failures == {"gone": "source_missing", "replaced": "source_changed"}
    assert after.plan.num_unusable == {"source_missing": 1, "source_changed": 1} and after.plan.num_chunks == 2
    assert len(read_shots(data)) == 1, "a failure that may be temporary must not be stored"


def test_a_lasting_failure_is_stored_and_tried_again_on_request_only(tmp_path: Path) -> None:
    text = tmp_path / "text.mp4"
    text.write_text("not a video")
    recipe = resolve(Recipe(len="2s", cut="shots"), ffmpeg_version="9.0")
    task = ShotTask(str(text), source_fingerprint(text), 60, recipe.settings.shot_detector)
    key = detector_key(recipe)
    shots_found = detect_shots(
        tmp_path,
        [task],
        shots=SHOTS.empty_table(),
        key=key,
        used_detectors={key},
        engine=Here(),
        check=lambda: None,
    )
    assert shots_found.shots.equals(read_shots(tmp_path))
    facts = {"path": str(text), "size_bytes": 1, "mtime_ns": 1, "fingerprint": task.fingerprint, "end_s": 2.0}
    probes = pa.Table.from_pylist([facts], schema=PROBES)
    for retry_failed, num_undetected in ((False, 0), (True, 1)):
        shots = shots_of(recipe, probes, shots=read_shots(tmp_path), retry_failed=retry_failed)
        assert shots is not None and len(shots.undetected_rows) == num_undetected
        assert [code for code, _ in shots.failures.values()] == ["source_unreadable"] * (not retry_failed)


KILLED = """
import os, signal, sys
from pathlib import Path
from clipmill.prep.video.plan_inputs import add_missing_shots, make_plan
from tests.prep.scenes import RECIPE
from tests.prep.here import Here

class Killed(Here):
    def run(self, *arguments, **named):
        for number, outcome in enumerate(super().run(*arguments, **named)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield outcome

add_missing_shots(make_plan(Path(sys.argv[1]), RECIPE), Killed())
"""


def test_a_killed_detection_goes_on_with_what_was_found(tmp_path: Path) -> None:
    videos, data = tmp_path / "videos", tmp_path / "data"
    for number in range(5):
        write_scenes(videos / f"{number}.mp4", [30] * (6 - number))
    manifest(data, videos)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(data)], cwd=ROOT, check=False)
    num_found = len(read_shots(data))
    assert killed.returncode == -signal.SIGKILL and 1 <= num_found <= 3
    summary = run_here(data)
    assert summary["num_searched"] == 5 - num_found and summary["num_chunks"] == 6 + 5 + 4 + 3 + 2


def test_workers_find_the_same_shots_and_their_chunks_have_the_same_bytes(tmp_path: Path) -> None:
    write_scenes(tmp_path / "videos" / "video.mp4", [40, 50, 45])
    shots_found = []
    for name in ("processes", "here"):
        data = tmp_path / name
        manifest(data, tmp_path / "videos")
        if name == "processes":
            add_missing_shots(make_plan(data, RECIPE), ProcessEngine(num_workers=1))
        assert run_here(data)["num_searched"] == (name == "here")
        shots_found.append(contents(data))
    assert shots_found[0] == shots_found[1]
