"""`train embed`: contents of the files, resuming, several processes, failures, and rejected input."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from clipmill.train.inference import load_model
from clipmill.train.search import embedding
from tests.train.conftest import VIDEOS
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.killed import killed_at
from tests.train.running import train
from tests.train.search.conftest import SMALL, content, embed, overwrite_chunk
from tests.train.search.small_parts import embed_small_parts
from tests.train.tiny_data import Caption, write_captions

TEXTS = [text for video in "abc" for text in ("it begins", f"the middle of {video}", f"the end of {video}")]


def rank_of_best(score: np.ndarray, right: np.ndarray) -> int:
    """Return 1 + the number of wrong items that score at least as high as the best correct item."""
    return 1 + int((score[~right] >= score[right].max()).sum())


def test_the_files_have_a_row_per_clip_and_per_caption(embedded_clips: Path, data_dir: Path) -> None:
    video, text = (np.load(embedded_clips / name, mmap_mode="r") for name in ("video.npy", "text.npy"))
    clips, captions = (pq.read_table(embedded_clips / f"{name}.parquet").to_pylist() for name in ("clips", "captions"))
    assert video.dtype == text.dtype == np.float32 and video.shape == text.shape == (9, 128)
    np.testing.assert_allclose(np.linalg.norm(np.concatenate([video, text]), axis=1), 1, rtol=1e-6)
    assert [clip["row"] for clip in clips] == [clip["caption"] for clip in clips] == list(range(9))
    assert [clip["text"] for clip in clips] == [caption["text"] for caption in captions] == TEXTS
    assert clips[4] == {
        "row": 4, "key": "b_000000000", "video": "b", "path": "/videos/b.mp4", "begin_s": 1.2, "end_s": 2.8,
        "text": TEXTS[4], "caption": 4,
    }  # fmt: skip
    assert clips[5]["key"] == "b_000002000" and clips[5]["end_s"] == 5.5  # an open end is the end of the video
    assert {**captions[4], "caption": 4} == {**clips[4], "clip": 4}
    assert not (embedded_clips / "parts").exists()
    record = json.loads((embedded_clips / "embed.json").read_text())
    assert record["num_clips"] == 9 and record["data"]["split"] == "train" and record["clip"]["num_frames"] == 2
    assert {name: facts["size_bytes"] for name, facts in record["files"].items()} == {
        name: len(its) for name, its in content(embedded_clips).items() if name != "embed.json"
    }


def test_scores_computed_by_numpy_are_those_of_eval_retrieval(
    embedded_clips: Path, run: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert train("eval", "retrieval", run, "--shards", data_dir, "--split", "train", "--json") == 0
    expected = json.loads(capsys.readouterr().out.splitlines()[-1])
    video, text = np.load(embedded_clips / "video.npy"), np.load(embedded_clips / "text.npy")
    caption = pq.read_table(embedded_clips / "clips.parquet")["caption"].to_numpy()
    _, first, text_of_clip = np.unique(text[caption], axis=0, return_index=True, return_inverse=True)
    assert len(first) == 7  # three clips have the text "it begins"
    similarity = video @ text[caption][first].T
    right = text_of_clip[:, None] == np.arange(len(first))
    for direction, scores, its in (
        ("text_to_video", similarity.T, right.T),
        ("video_to_text", similarity, right),
    ):
        ranks = np.array([rank_of_best(*pair) for pair in zip(scores, its, strict=True)])
        assert expected[direction]["recall"] == {str(k): float((ranks <= k).mean()) for k in (1, 5, 10)}
        assert expected[direction]["median_rank"] == np.median(ranks)


def test_embeddings_are_those_of_load_model(embedded_clips: Path, run: Path) -> None:
    model = load_model(run, device="cpu")
    text = np.load(embedded_clips / "text.npy")
    assert np.array_equal(text[[0, 3]], np.stack([text[6]] * 2))  # equal texts
    torch.testing.assert_close(torch.from_numpy(text), model.encode_text(TEXTS))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "_BATCHES_PER_PART", 1)
    monkeypatch.setattr(embedding, "_TEXTS_PER_PART", 4)


def words(run: Path, data_dir: Path, out: Path) -> list[str]:
    flags = f"--split train --workers 1 --device cpu --batch 2 --shards {data_dir} --out {out}"
    return [str(run), *flags.split()]


@pytest.mark.usefixtures("small_parts")
def test_two_processes_write_the_same_bytes_as_one(
    embedded_clips: Path, run: Path, data_dir: Path, tmp_path: Path
) -> None:
    first_out, two = tmp_path / "one", tmp_path / "two"
    assert train("embed", *words(run, data_dir, first_out)) == 0
    end_well(fork_ranks(embed_small_parts, *words(run, data_dir, two), size=2, folder=tmp_path))
    assert content(two) == content(first_out)
    assert content(first_out)["clips.parquet"] == content(embedded_clips)["clips.parquet"]
    np.testing.assert_allclose(np.load(first_out / "video.npy"), np.load(embedded_clips / "video.npy"), atol=1e-6)


@pytest.mark.usefixtures("small_parts")
def test_a_killed_command_is_resumed_to_the_same_bytes(
    run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    assert train("embed", *words(run, data_dir, whole)) == 0
    status: int | None = -signal.SIGKILL
    num_resumed, number = 0, 2
    while status == -signal.SIGKILL:
        out = tmp_path / f"killed-{number}"
        status = killed_at(number, embed_small_parts, *words(run, data_dir, out), folder=out)
        is_finished = (out / "embed.json").exists()
        capsys.readouterr()
        assert train("embed", *words(run, data_dir, out)) == 0
        num_resumed += "resumed: " in capsys.readouterr().out
        assert content(out) == content(whole), f"killed at change {number}, finished: {is_finished}"
        number += 8
    assert status == 0 and num_resumed >= 3


def test_the_same_command_again_does_nothing_and_another_one_is_refused(
    embedded_clips: Path, run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "embedded"
    shutil.copytree(embedded_clips, out)
    before = content(out)
    assert embed(run, data_dir, out) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert embed(run, data_dir, out, "--num-frames", 3) == 2
    stderr = capsys.readouterr().err
    assert "holds other embeddings" in stderr and "clip.num_frames was 2 and is 3" in stderr
    assert f"the weights were {load_model(run, device='cpu').description} ({run}) and are" in stderr
    assert embed(run, data_dir, out, split="val") == 2
    assert "data.split was train and is val" in capsys.readouterr().err
    assert content(out) == before


def test_a_damaged_folder_is_not_taken_for_finished(
    embedded_clips: Path, run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "embedded"
    shutil.copytree(embedded_clips, out)
    (out / "video.npy").write_bytes((out / "video.npy").read_bytes()[:200])
    capsys.readouterr()
    assert embed(run, data_dir, out) == 2
    output = capsys.readouterr()
    assert "video.npy is 200 bytes long, not" in output.err and f"remove {out}" in output.err
    assert "nothing to do" not in output.out


def test_the_data_of_a_run_are_embedded_where_none_are_named(
    embedded_clips: Path, run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--split", "train", "--workers", 1, "--device", "cpu")
    assert train("embed", run, "--out", tmp_path / "own", *flags) == 0
    assert content(tmp_path / "own")["video.npy"] == content(embedded_clips)["video.npy"]
    several, exported = tmp_path / "several", tmp_path / "exported"
    shutil.copytree(run, several)
    settings = yaml.safe_load((several / "settings.yaml").read_text())
    (several / "settings.yaml").write_text(yaml.safe_dump({**settings, "shards": [str(data_dir), "other"]}))
    assert train("export", run, "--format", "open_clip", "--out", exported) == 0
    capsys.readouterr()
    for weights, message in (
        (several, "was trained on 2 data folders"),
        (exported, "--shards is missing"),
        (tmp_path / "nowhere", "there is no run in"),
    ):
        assert train("embed", weights, "--out", tmp_path / "out", *flags) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_unfinished_work_is_not_continued_with_other_weights(
    run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, out = tmp_path / "other", tmp_path / "out"
    assert train("dual-encoder", "--shards", data_dir, "--out", other, *SMALL, "--seed", 1) == 0
    assert killed_at(7, embed_small_parts, *words(run, data_dir, out), folder=out) == -signal.SIGKILL
    assert (out / "parts" / "plan.json").is_file()
    capsys.readouterr()
    assert embed(other, data_dir, out, "--batch", 2) == 2
    stderr = capsys.readouterr().err
    assert f"({run}) and are" in stderr and f"({other})" in stderr and "step 2" in stderr


def test_a_folder_of_other_files_is_refused(
    run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert embed(run, data_dir, tmp_path) == 2
    assert "exists already" in capsys.readouterr().err
    assert content(tmp_path) == {"notes.txt": b"mine"}
    assert embed(run, data_dir, tmp_path / "notes.txt") == 2
    assert "is a file" in capsys.readouterr().err


def test_clips_that_cannot_be_decoded_are_named_and_have_no_row(
    embedded_clips: Path, run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, out = tmp_path / "damaged", tmp_path / "out"
    shutil.copytree(data_dir, damaged)
    overwrite_chunk(damaged, "b_000002000")
    assert embed(run, damaged, out) == 1
    assert "2 clips could not be decoded" in (stderr := capsys.readouterr().err) and "failures.jsonl" in stderr
    failures = [json.loads(line) for line in (out / "failures.jsonl").read_text().splitlines()]
    assert [(failure["position"], failure["key"], failure["reason"]) for failure in failures] == [
        (4, "b_000002000", "checksum"),
        (5, "b_000002000", "checksum"),
    ]
    clips, captions = (pq.read_table(out / f"{name}.parquet") for name in ("clips", "captions"))
    assert np.load(out / "video.npy").shape == (7, 128) and np.load(out / "text.npy").shape == (9, 128)
    assert clips["text"].to_pylist() == TEXTS[:4] + TEXTS[6:] and clips["row"].to_pylist() == list(range(7))
    assert clips["caption"].to_pylist() == [0, 1, 2, 3, 6, 7, 8]
    assert captions["clip"].to_pylist() == [0, 1, 2, 3, None, None, 4, 5, 6]
    assert np.abs(np.load(out / "video.npy")).max(axis=1).min() > 0
    # The second run has nothing to do, but still reports the failures.
    assert embed(run, damaged, out) == 1
    assert f"remove {out}, and run the same command again" in capsys.readouterr().err


def test_features_of_other_towers_pooled_and_all_tokens(masked_run: Path, data_dir: Path, tmp_path: Path) -> None:
    pooled, tokens = tmp_path / "pooled", tmp_path / "tokens"
    assert embed(masked_run, data_dir, pooled) == 0
    assert embed(masked_run, data_dir, tokens, "--features", "tokens", "--batch", 4) == 0
    rows, each = np.load(pooled / "video.npy", mmap_mode="r"), np.load(tokens / "video.npy", mmap_mode="r")
    assert rows.shape == (9, 128) and each.shape == (9, 4, 128)
    # The pooled features of a masked autoencoder are the mean of its tokens.
    np.testing.assert_allclose(each.mean(axis=1), rows, atol=1e-5)
    assert not (pooled / "text.npy").exists() and (pooled / "captions.parquet").exists()


def test_pooled_features_of_a_dual_encoder_precede_its_projection(run: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "pooled"
    assert embed(run, data_dir, out, "--features", "pooled") == 0
    projection = load_model(run, device="cpu").model.state_dict()["video.proj"].numpy()
    embedded = np.load(out / "video.npy") @ projection
    embedded /= np.linalg.norm(embedded, axis=1, keepdims=True)
    assert embed(run, data_dir, tmp_path / "embedding") == 0
    np.testing.assert_allclose(embedded, np.load(tmp_path / "embedding" / "video.npy"), atol=1e-5)


def test_whole_chunks_need_no_captions(run: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "chunks"
    assert embed(run, data_dir, out, "--clips", "chunks") == 0
    clips = pq.read_table(out / "clips.parquet").to_pydict()
    assert clips["key"] == [f"{video}_{start:09d}" for video in "abc" for start in (0, 2000, 4000)]
    assert clips["text"] == [None] * 9 and clips["end_s"][:3] == [2.0, 4.0, 5.5]
    assert np.load(out / "video.npy").shape == (9, 128) and not (out / "captions.parquet").exists()


def test_a_split_without_captions_is_pointed_to_its_chunks(
    run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(data_dir, bare)
    write_captions(bare, VIDEOS, [Caption("a", 0.0, 1.0, "it begins")])
    assert embed(run, bare, tmp_path / "out", split="val") == 2
    stderr = capsys.readouterr().err
    assert "has no captions of split 'val'" in stderr and "--clips chunks" in stderr
    assert embed(run, bare, tmp_path / "out", "--clips", "chunks", split="val") == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--split", "nowhere"], "no videos of split 'nowhere'"),
        (["--batch", "0"], "--batch is 0"),
        (["--features", "embedding"], "is not a dual encoder"),
    ],
)
def test_what_cannot_be_embedded_is_refused_and_leaves_nothing(
    masked_run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert train("embed", masked_run, "--shards", data_dir, "--out", tmp_path / "out", *flags) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
