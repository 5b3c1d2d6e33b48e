"""The suite passes whatever the user of the machine has set: some of its files, run among hostile settings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Their messages, files and requests depend on most of the settings.
FILES = (
    "tests/prep/core/test_system_errors.py::test_a_record_that_cannot_be_written_is_named",
    "tests/prep/commands/test_user_errors.py::test_a_folder_without_manifest_or_shards",
    "tests/manifests/storage/test_objects.py::test_a_missing_bucket_is_named",
    "tests/manifests/storage/test_leases.py::test_of_many_at_once_one_wins",
)
NOTHING_LISTENS = "http://127.0.0.1:9"
HOSTILE = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), NOTHING_LISTENS),
    **dict.fromkeys(("LANG", "LC_ALL"), "C"),
    **dict.fromkeys(("AWS_ENDPOINT_URL", "OPENAI_BASE_URL", "HF_ENDPOINT"), NOTHING_LISTENS),
    **dict.fromkeys(("CLIPMILL_DATA", "HF_HOME", "XDG_CACHE_HOME", "RAY_TMPDIR"), "/nonexistent"),
    **dict.fromkeys(("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY"), "of-the-user"),
    **{"RAY_ADDRESS": "127.0.0.1:9", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "RANK": "1", "WORLD_SIZE": "4"},
    **{"FORCE_COLOR": "1", "COLUMNS": "40", "PYTHONWARNINGS": "error::UserWarning", "PYTHONDONTWRITEBYTECODE": "1"},
}


@pytest.mark.nightly
def test_the_suite_passes_on_a_machine_with_other_settings(repository: Path, tmp_path: Path) -> None:
    old = tmp_path / "bin/ffmpeg"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho ffmpeg version 5.1.9-0+deb12u1 Copyright\n")
    old.chmod(0o755)
    path = {"PATH": f"{old.parent}{os.pathsep}{os.environ['PATH']}"}
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CLIPMILL_"))}
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", str(tmp_path / "tests"), *FILES]
    command = [sys.executable, "-m", "pytest", *words]
    ran = subprocess.run(
        command, cwd=repository, env=outside | HOSTILE | path, umask=0o077, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout and "skipped" not in ran.stdout
