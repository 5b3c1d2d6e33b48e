"""All commands on a bucket of each cloud: `python -m tests.object_storage.clouds gs az`; see README.md."""

import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from clipmill.manifests.storage.objects import open_objects
from tests.object_storage.azure import AzureServer, azure_server
from tests.object_storage.faults import Fault, Faults, faulty
from tests.object_storage.folders import contents_of, upload
from tests.object_storage.google import GoogleServer, google_server, write_key_file
from tests.object_storage.server import S3Server, s3_server
from tests.prep.running import MARK, Ran, contents, prep, processes, start, wait_until
from tests.test_bucket_path import CHUNKS, LATENTS, STORED, TEXT, columns, manifest, write_videos

_STEPS = ("--batch", 4, "--steps", 5, "--warmup-steps", 1, "--device", "cpu", "--workers", 1)
_PIXELS = ("--preset", "tiny", "--num-frames", 2, "--size-px", 32, *_STEPS)
_LATENTS = (*STORED, "--batch", 4, "--steps", 5, "--warmup-steps", 1, "--device", "cpu")
_COMMIT = r"commits(/|%2F)"


def main() -> None:
    """Run the trial for each cloud in the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clouds", nargs="+", choices=("s3", "gs", "az"))
    for cloud in parser.parse_args().clouds:
        with (
            tempfile.TemporaryDirectory(prefix="clips-") as folder,
            _server(cloud) as server,
            faulty(server.port) as faults,
        ):
            _use(server, faults.port)
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            bucket = server.make_bucket(f"clips-{secrets.token_hex(4)}")
            print(f"{cloud}: {bucket}", flush=True)
            _try(bucket, Path(folder), faults)


@contextlib.contextmanager
def _server(cloud: str) -> Iterator[S3Server | AzureServer | GoogleServer]:
    if cloud == "az":
        with azure_server() as azure:
            yield azure
        return
    with s3_server() as s3:
        if cloud == "s3":
            yield s3
            return
        with google_server(s3) as google:
            yield google


def _use(server: S3Server | AzureServer | GoogleServer, port: int) -> None:
    """Set the environment variables that make clients use the proxy in front of a server."""
    if isinstance(server, S3Server):
        os.environ.update(server.environment(endpoint=f"http://127.0.0.1:{port}"))
    else:
        os.environ.update(server.environment(port=port))


def _try(bucket: str, folder: Path, faults: Faults) -> None:
    local, data, videos = folder / "local", f"{bucket}/some/data", write_videos(folder / "videos")
    for command in (manifest(videos), CHUNKS, LATENTS, TEXT):
        prep(*command, "--data", local)

    _move(folder / "first")
    upload(videos, f"{bucket}/videos")
    _step(*manifest(f"{bucket}/videos"), "--data", data)
    _kill_and_exclude(data, faults)

    _move(folder / "second")
    begin_s = time.monotonic()
    prep(*CHUNKS, "--data", data)
    print(
        f"prep chunk, on another machine ({time.monotonic() - begin_s:.0f} s, with the wait for the lock)", flush=True
    )
    variant = next(info.key for info in open_objects(data).list("video") if "/commits/" in info.key).split("/commits/")[
        0
    ]
    open_objects(data).write(f"{variant}/.tmp-0123456789ab-shards.txt", b"left by a command that was killed")
    for command in (LATENTS, TEXT, ("status",), ("verify",), ("gc",), ("gc",)):
        _step(*command, "--data", data)
    digests, expected = columns(contents_of(data)), columns(contents(local))
    assert digests == expected, digests.items() ^ expected.items()
    print("    the bytes are those of a local folder", flush=True)
    for name, flags in (("pixels", _PIXELS), ("latents", _LATENTS)):
        _step_of_training(name, flags, data, folder)
    _try_wrong_credentials(bucket, data, folder)


def _kill_and_exclude(data: str, faults: Faults) -> None:
    """Kill `prep chunk` after its first commit; while it runs, a second command is rejected."""
    mark = secrets.token_hex(8)
    faults.set(Fault("hang", method="PUT", path=_COMMIT, skip=1))
    running = start(*CHUNKS, "--data", data, **{MARK: mark})
    wait_until(lambda: faults.seen().num_faults, seconds=120)
    refused = prep(*CHUNKS, "--data", data, status=2)
    assert "another command is writing" in refused.error
    print(f"two drivers at once: {refused.stderr.strip()}", flush=True)
    status = prep("status", "--data", data).stdout
    assert f"in progress: written by process {running.pid}" in status, status
    running.send_signal(signal.SIGKILL)
    running.communicate()
    wait_until(lambda: not list(processes(mark)), seconds=60)
    faults.set()
    keys = [info.key for info in open_objects(data).list()]
    assert sum("/commits/" in key for key in keys) == 1
    print("prep chunk: killed after its first shard", flush=True)


def _move(scratch: Path) -> None:
    """Continue on a disk without copies of the bucket."""
    scratch.mkdir()
    os.environ["TMPDIR"] = str(scratch)


def _step(*words: object) -> Ran:
    begin_s = time.monotonic()
    ran = prep(*words)
    print(f"prep {words[0]} ({time.monotonic() - begin_s:.0f} s): {_last_line(ran.stdout)}", flush=True)
    return ran


def _step_of_training(name: str, flags: tuple[object, ...], data: str, folder: Path) -> None:
    words = ("dual-encoder", *flags, "--shards", data, "--out", folder / name, "--cache", folder / "cache")
    command = [sys.executable, "-m", "clipmill.train.cli", *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    print(f"train dual-encoder, {name}: {_last_line(ran.stdout + ran.stderr)}", flush=True)


def _try_wrong_credentials(bucket: str, data: str, folder: Path) -> None:
    """Check the messages about wrong and missing credentials, and about a missing bucket."""
    print(f"no bucket: {prep('status', '--data', f'{bucket}-not/data', status=2).stderr.strip()}")
    wrong = {
        "AWS_ACCESS_KEY_ID": "",
        "AZURE_STORAGE_ACCOUNT_KEY": "bm90IHRoZSBrZXk=",
        "GOOGLE_APPLICATION_CREDENTIALS": str(write_key_file(folder / "other.json")),
    }
    if not bucket.startswith("s3"):  # moto accepts any credentials
        print(f"wrong credentials: {prep('status', '--data', data, status=2, **wrong).stderr.strip()}")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


if __name__ == "__main__":
    main()
