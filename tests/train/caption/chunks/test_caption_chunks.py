"""`train caption-chunks`: contents of the table, resuming, several processes, failures and user errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from clipmill.train.inference import load_model
from clipmill.train.run.parts import differences
from clipmill.train.tasks.caption import chunk_captions
from tests.train.caption.chunks.small_parts import caption_small_parts
from tests.train.caption.conftest import DECODER, SMALL
from tests.train.conftest import NUM_FRAMES, VIDEOS
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.running import train
from tests.train.search.conftest import content, overwrite_chunk
from tests.train.tiny_data import Caption, chunks_of, encode_chunk, video_sample, write_captions, write_shard

KEYS = [(video, begin, end) for video in "abc" for begin, end in ((0.0, 2.0), (2.0, 4.0), (4.0, 5.5))]


def words(run: Path, data_dir: Path, out: Path, **other: object) -> list[str]:
    flags = {"workers": 1, "device": "cpu", "batch": 4, "num_samples": 3, "temperature": 2, **other}
    named = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [str(run), "--shards", str(data_dir), "--out", str(out), *named]


def caption(run: Path, data_dir: Path, out: Path, **other: object) -> int:
    return train("caption-chunks", *words(run, data_dir, out, **other))


def rows(out: Path) -> list[dict[str, Any]]:
    rows_read: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    return rows_read


def metadata(out: Path) -> dict[str, Any]:
    record_read: dict[str, Any] = json.loads(pq.read_schema(out).metadata[b"clipmill"])
    return record_read


@pytest.fixture(scope="module")
def table(captioner_run: Path, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("table") / "pseudo.parquet"
    assert caption(captioner_run, data_dir, out) == 0
    return out


def test_the_table_has_several_captions_of_each_chunk_and_names_its_model(
    table: Path, captioner_run: Path, data_dir: Path
) -> None:
    table_rows, record = rows(table), metadata(table)
    assert list(table_rows[0]) == ["video", "begin_s", "end_s", "text", "source", "likelihood", "sample"]
    places = [(*key, sample) for key in KEYS for sample in range(3)]
    assert [(row["video"], row["begin_s"], row["end_s"], row["sample"]) for row in table_rows] == places
    assert all(row["text"] and row["likelihood"] < 0 for row in table_rows)
    assert len({row["text"] for row in table_rows}) > 9
    assert record["kind"] == "pseudo-captions" and record["weights"] == "run"
    assert record["weights_sha256"] == load_model(captioner_run).identity
    assert {row["source"] for row in table_rows} == {f"run@{record['weights_sha256'][:8]}"}
    settings = record["settings"]
    assert (settings["split"], settings["method"], settings["top_p"], settings["num_samples"]) == (
        *("train", "sample", 0.9, 3),
    )
    counts = ("num_clips", "num_captions", "num_empty", "num_failed")
    assert [record[name] for name in counts] == [9, 27, 0, 0]
    assert record["video_variant"] == json.loads((data_dir / "dataset.json").read_text())["columns"]["video"]["current"]
    assert list(table.parent.iterdir()) == [table]


def test_where_selects_the_chunks_that_get_captions(
    table: Path, captioner_run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "later.parquet"
    assert caption(captioner_run, data_dir, out, where="begin_s >= 2 and video != 'b'") == 0
    captioned = [(row["video"], row["begin_s"], row["end_s"]) for row in rows(out)[::3]]
    assert captioned == [key for key in KEYS if key[0] != "b" and key[1] >= 2]
    assert caption(captioner_run, data_dir, out) == 2
    assert "settings.where was begin_s >= 2" in capsys.readouterr().err.replace("\n", " ")


def test_a_caption_depends_on_seed_key_and_sample_alone(
    table: Path, captioner_run: Path, data_dir: Path, tmp_path: Path
) -> None:
    alone, other = tmp_path / "alone.parquet", tmp_path / "other.parquet"
    assert caption(captioner_run, data_dir, alone, batch=1, num_samples=2) == 0
    expected = [row for row in rows(table) if row["sample"] < 2]
    table_rows = rows(alone)
    assert [row["text"] for row in table_rows] == [row["text"] for row in expected]
    likelihoods, its = ([row["likelihood"] for row in table] for table in (table_rows, expected))
    np.testing.assert_allclose(likelihoods, its, rtol=1e-5)
    assert caption(captioner_run, data_dir, other, seed=1, num_samples=2) == 0
    assert [row["text"] for row in rows(other)] != [row["text"] for row in expected]


def test_segments_and_other_methods_have_one_caption_per_clip(
    captioner_run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, flags = tmp_path / "new" / "segments.parquet", ("--shards", data_dir, "--split", "val", "--device", "cpu")
    assert train("caption-chunks", captioner_run, *flags, "--out", out, "--method", "beam", "--segment", "800ms") == 0
    # A remainder of half a segment becomes its own segment. A remainder of less than a quarter does not occur here.
    spans = [(0.0, 0.8), (0.8, 1.6), (1.6, 2.0), (2.0, 2.8), (2.8, 3.6), (3.6, 4.0), (4.0, 4.8), (4.8, 5.5)]
    assert [(row["begin_s"], row["end_s"], row["sample"]) for row in rows(out)] == [(*span, 0) for span in spans]
    capsys.readouterr()
    greedy = tmp_path / "greedy.parquet"
    words = ("--out", greedy, "--method", "greedy", "--segment", "1750ms", "--json")
    assert train("caption-chunks", captioner_run, *flags, *words) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"out": str(greedy), **metadata(greedy)} and printed["num_captions"] == 3
    assert [(row["begin_s"], row["end_s"]) for row in rows(greedy)] == [key[1:] for key in KEYS[:3]]


def test_two_processes_write_the_same_bytes_as_one(
    captioner_run: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_captions, "_BATCHES_PER_PART", 1)
    first_path, two = tmp_path / "one.parquet", tmp_path / "two.parquet"
    assert caption(captioner_run, data_dir, first_path) == 0
    end_well(fork_ranks(caption_small_parts, *words(captioner_run, data_dir, two), size=2, folder=tmp_path))
    assert two.read_bytes() == first_path.read_bytes()


def test_the_same_again_does_nothing_and_other_captions_are_refused_by_name(
    table: Path, captioner_run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, changed, trained = tmp_path / "pseudo.parquet", tmp_path / "changed", tmp_path / "run"
    shutil.copy(table, out)
    capsys.readouterr()
    assert caption(captioner_run, data_dir, out) == 0
    assert "nothing to do" in capsys.readouterr().out
    more = ("--steps", 2, "--seed", 1)
    assert train("caption", "--shards", data_dir, "--out", trained, *SMALL.split(), *DECODER.split(), *more) == 0
    shutil.copytree(data_dir, changed)
    # The tars also contain captions, which do not affect the captioned frames.
    write_captions(changed, VIDEOS, [Caption("a", 0.0, 1.0, "it begins")])
    assert caption(captioner_run, changed, out) == 0
    # The last chunk shows different frames for the same time span.
    chunks = [chunk for name in "abc" for chunk in chunks_of(name, NUM_FRAMES)]
    write_shard(changed, 0, [*chunks[:-1], video_sample("c", 4000, encode_chunk(0, 15))], split="train")
    for run, data, flags, named in (
        (trained, data_dir, {}, "weights_sha256 was"),
        (captioner_run, changed, {}, "chunks_sha256 was"),
        (
            captioner_run,
            data_dir,
            {"top_p": 0.5, "seed": 3},
            "settings.top_p was 0.9 and is 0.5; settings.seed was",
        ),
        (captioner_run, data_dir, {"segment": "1s"}, "settings.segment_us was None and is 1000000"),
    ):
        capsys.readouterr()
        assert caption(run, data, out, **flags) == 2
        assert f"{out} does not contain the requested captions: {named}" in capsys.readouterr().err
    assert out.read_bytes() == table.read_bytes()


def test_unfinished_work_is_not_continued_as_other_work(
    captioner_run: Path,
    data_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "pseudo.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(chunk_captions, "publish_table", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            caption(captioner_run, data_dir, out)
    assert caption(captioner_run, data_dir, out, seed=1) == 2
    stderr = capsys.readouterr().err
    assert (
        f"{tmp_path / 'pseudo.parts'} does not contain the requested captions: settings.seed was 0 and is 1" in stderr
    )
    assert caption(captioner_run, data_dir, out) == 0
    assert "resumed: 1 of 1 part finished" in capsys.readouterr().out


def test_chunks_that_cannot_be_decoded_are_listed_and_have_no_row(
    table: Path, captioner_run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, out = tmp_path / "damaged", tmp_path / "pseudo.parquet"
    shutil.copytree(data_dir, damaged)
    overwrite_chunk(damaged, "b_000002000")
    for _ in range(2):  # the second run has nothing to do, but the failure is still reported
        assert caption(captioner_run, damaged, out) == 1
        stderr = capsys.readouterr().err
        assert "1 clip could not be decoded; see" in stderr and "pseudo.failures.jsonl" in stderr
    # The message says how to continue after the data are repaired.
    again = f"remove {out} and {tmp_path / 'pseudo.failures.jsonl'}, and run the same command again"
    assert again in " ".join(stderr.split())
    [failure] = [json.loads(line) for line in (tmp_path / "pseudo.failures.jsonl").read_text().splitlines()]
    assert (failure["position"], failure["key"], failure["reason"]) == (4, "b_000002000", "checksum")
    assert rows(out) == [row for row in rows(table) if (row["video"], row["begin_s"]) != ("b", 2.0)]
    assert metadata(out)["num_failed"] == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "captions.csv"], "--out captions.csv does not end in .parquet"),
        (["--split", "nowhere"], "no videos of split 'nowhere'"),
        (["--batch", "0"], "--batch is 0"),
        (["--segment", "5"], '--segment "5" is not a length'),
        (["--num-samples", "0"], "--num-samples is 0"),
        (["--method", "greedy", "--num-samples", "5"], "--num-samples 5 has no effect with --method greedy"),
        (["--temperature", "0"], "use the decoding method greedy"),
        (["--max-tokens", "13"], "--max-tokens is 13, but the decoder's context has 12 tokens"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(
    captioner_run: Path,
    data_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    out = () if "--out" in flags else ("--out", tmp_path / "pseudo.parquet")
    assert train("caption-chunks", captioner_run, "--shards", data_dir, *out, *flags) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_clip_of_open_clip_is_refused_before_a_download(
    captioner_run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without network access, a download would cause a different error.
    assert caption(Path("ViT-B-16:openai"), data_dir, tmp_path / "pseudo.parquet") == 2
    output = capsys.readouterr()
    assert "ViT-B-16:openai is a CLIP model from open_clip, not a model of train caption" in output.err
    assert "download" not in output.out + output.err
    assert caption(tmp_path / "nowhere", data_dir, tmp_path / "pseudo.parquet") == 2
    output = capsys.readouterr()
    assert "there is no run in" in output.err and "NAME:TAG" not in output.err and not list(tmp_path.iterdir())


def test_long_values_are_shown_from_where_they_differ() -> None:
    variant, digest = "h264-288p30-crf24-comb900-15s-shots-scenedetect-adaptive-3.0-cuts", "0123456789abcdef" * 4
    names = differences({"a": f"{variant}-v1"}, {"a": f"{variant}-v2"})
    assert names == "a was ...0-cuts-v1 and is ...0-cuts-v2"
    assert differences({"a": "x" + digest}, {"a": "y" + digest}) == (
        f"a was x{digest[:31]}... and is y{digest[:31]}..."
    )
    short = "h264-288p30-crf24-comb900-15s"
    assert differences({"a": short}, {"a": f"{short}-shots"}) == f"a was {short} and is {short}-shots"


def test_files_that_are_no_such_table_stay(
    captioner_run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pseudo.parquet"
    out.write_text("mine")
    assert caption(captioner_run, data_dir, out) == 2
    assert "is not a table of train caption-chunks" in capsys.readouterr().err
    (tmp_path / "other.parts").mkdir()
    (tmp_path / "other.parts" / "notes.txt").write_text("mine")
    assert caption(captioner_run, data_dir, tmp_path / "other.parquet") == 2
    assert "other.parts, the folder for unfinished work, exists already" in capsys.readouterr().err
    assert content(tmp_path) == {"pseudo.parquet": b"mine", "other.parts/notes.txt": b"mine"}
