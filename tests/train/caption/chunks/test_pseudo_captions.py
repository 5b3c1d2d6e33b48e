"""The documented *Pseudo-captions* commands, run in order at a tiny size."""

import csv
import json
import re
import shlex
import shutil
from fractions import Fraction
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from clipmill.manifests.store import read_captions
from clipmill.prep.cli import main as prep_main
from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.shards.reader import Variant
from tests.train.running import train

NAMES = ("a", "b", "c", "d", "val/e")
LABELLED = ("a", "val/e")
PICTURES = ("--size-px", 32, "--num-frames", 2, "--workers", 1, "--device", "cpu")
TINY = (*PICTURES, "--batch", 2, "--warmup-steps", 1)
SMALLER: dict[str, tuple[object, ...]] = {
    "prep chunk": ("--engine", "processes", "--workers", 1),
    "train caption": (*TINY, "--steps", 8, "--decoder.max-tokens", 10, "--decoding.max-tokens", 10),
    "train caption-chunks": ("--workers", 1, "--device", "cpu"),
    "train dual-encoder": (*TINY, "--steps", 2),
}


def documented_commands(repository: Path) -> list[list[str]]:
    """Return the commands of the section, one per line, with the flags that make them small."""
    text = (repository / "docs/data.md").read_text()
    section = re.search(r"^## Pseudo-captions\n.*?^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    lines = [shlex.split(line, comments=True) for line in section[1].splitlines()]
    return [[*line, *map(str, SMALLER.get(" ".join(line[:2]), ()))] for line in lines]


def run(words: list[str]) -> int:
    if words[0] == "train":
        return train(*words[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as left:
            prep_main()
    return int(left.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working folder with videos of 8 s, one of them held out, and captions.csv."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLIPMILL_DATA", raising=False)
    for name in NAMES:
        FrameNumberVideo(num_frames=40, fps=Fraction(5), width=64, height=48).write(tmp_path / f"videos/{name}.mp4")
    with (tmp_path / "captions.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("video", "begin_s", "end_s", "text"))
        rows.writerows((name, at, at + 4, f"numbers from {at} of {name[-1]}") for name in LABELLED for at in (0, 4))
    return tmp_path


def sources() -> dict[str, set[str]]:
    """Return the videos that have captions from each source."""
    texts_by_source: dict[str, set[str]] = {}
    for caption in read_captions(Path("data")).to_pylist():
        texts_by_source.setdefault(caption["source"], set()).add(caption["video_id"].rpartition("-")[2])
    return texts_by_source


def texts_in_tars() -> str:
    shards = Variant.open(Path("data")).require_complete().shards()
    members = [shard.read(row, "txt") for shard in shards for row in range(len(shard.index))]
    return "\n".join(member.decode() for member in members)


@pytest.mark.nightly
def test_the_documented_path_and_a_captioner_that_changed(
    repository: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *before, caption, add, chunk, train, evaluate = documented_commands(repository)
    for words in before:
        assert run(words) == 0, words
    assert list(sources()) == ["human"]
    assert run(caption) == 0
    table = pq.read_table("pseudo.parquet")
    assert len(set(zip(*(table[name].to_pylist() for name in ("video", "begin_s")), strict=True))) == 8
    [source] = set(table["source"].to_pylist())
    assert re.fullmatch("captioner@[0-9a-f]{8}", source)

    assert run(add) == 0
    sources_found = sources()
    assert sources_found.keys() == {"human", source} and len(sources_found[source]) == 4
    capsys.readouterr()
    assert run(chunk) == 0
    assert "0 chunks encoded, 4 copied" in capsys.readouterr().out
    texts = texts_in_tars()
    assert all(caption["text"] in texts for caption in read_captions(Path("data")).to_pylist())
    assert run(caption) == 0  # the chunks are the same, but their tars contain different captions
    assert "nothing to do: pseudo.parquet is finished" in capsys.readouterr().out
    assert run(train) == 0
    assert f"{source} = 1 (40 captions)" in capsys.readouterr().out
    assert run(evaluate) == 0

    # After the captioner changes, its captions are reported as stale, and captions of its new version replace them.
    shutil.rmtree("runs/captioner")
    assert run([*before[-1], "--seed", "1"]) == 0
    capsys.readouterr()
    assert run(caption) == 2
    assert "pseudo.parquet does not contain the requested captions: weights_sha256 was" in capsys.readouterr().err
    Path("pseudo.parquet").unlink()
    for words in (caption, add, chunk):
        assert run(words) == 0, words
    sources_found = sources()
    assert source not in sources_found and len(sources_found) == 2
    newer = json.loads(pq.read_schema("pseudo.parquet").metadata[b"clipmill"])["weights_sha256"]
    assert f"captioner@{newer[:8]}" in sources_found
