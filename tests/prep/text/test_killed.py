"""SIGKILL in the middle of `prep text`: the next run does the rest, and the bytes are those of an undisturbed run."""

import os
import secrets
import shutil
import signal
from pathlib import Path

import pytest

from clipmill.shards.commits import read_commits
from tests.prep.running import MARK, contents, processes, start, wait_until
from tests.prep.text.sets import Encoding, encode, samples, write_captions

NUM_TEXTS = 8_000


@pytest.mark.parametrize("engine", ["processes"])
def test_a_killed_run_is_finished_by_the_next(tmp_path: Path, engine: str) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    captions = {f"v{n}": [f"text {k} of {n}" for k in range(NUM_TEXTS // 4)] for n in range(4)}
    write_captions(data, captions, splits={"v3": "val"})
    shutil.copytree(data, other)
    mark = secrets.token_hex(8)
    arguments = ("text", "--clip", "tiny", "--data", data, "--engine", engine, "--workers", 1, "--num-gpus", 0)
    process = start(*arguments, **{MARK: mark})
    wait_until(lambda: list(data.glob("text/*/bank/[0-9a-f]*.arrow")) or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not list(processes(mark)))
    (folder,) = (data / "text").iterdir()
    assert not read_commits(folder).commits, "killed too late to tell anything"

    here = Encoding()
    summary = encode(data, engine=here, batch=32)
    assert 0 < len(here.texts) < NUM_TEXTS and summary.num_encoded + summary.num_reused == NUM_TEXTS
    assert summary.num_reused == NUM_TEXTS - len(here.texts)
    encode(other, batch=32)
    assert contents(data / "text") == contents(other / "text")
    assert sum(len(sample["json"]["texts"]) for sample in samples(folder).values()) == NUM_TEXTS
