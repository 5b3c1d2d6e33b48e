"""`train search`: by text and by example, its page, and rejected input."""

import base64
import io
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
from av.container import InputContainer

from clipmill.manifests.publish import publish_checked_json
from clipmill.prep.synthetic import read_frame_number
from clipmill.train.evaluation import player
from clipmill.train.inference import load_model
from clipmill.train.search.folder import EmbeddedClip, open_embeddings
from tests.train.running import train
from tests.train.search.conftest import SMALL, embed, overwrite_chunk
from tests.train.tiny_data import Caption, write_captions


@pytest.fixture
def search(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the results of a search as JSON."""

    def call(*words: object) -> dict[str, Any]:
        capsys.readouterr()
        assert train("search", *words, "--device", "cpu", "--json") == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return call


def rows(result: dict[str, Any], query: int = 0) -> list[int]:
    return [hit["row"] for hit in result["results"][query]["found"]]


def assert_best(hits: Sequence[int], similarity: np.ndarray) -> None:
    """Assert that the rows are the most similar ones, best first; libraries order equal rows by their last bits."""
    assert len(set(hits)) == len(hits)
    np.testing.assert_allclose(similarity[list(hits)], -np.sort(-similarity)[: len(hits)], atol=1e-6)


def test_clips_are_ordered_by_their_similarity_to_each_text(embedded_clips: Path, run: Path, search: Any) -> None:
    texts = ["the middle of a", "it ends"]
    result = search(embedded_clips, *texts, "--top", 4)
    similarity = load_model(run, device="cpu").encode_text(texts).numpy() @ np.load(embedded_clips / "video.npy").T
    assert [entry["query"] for entry in result["results"]] == texts and result["num_clips"] == 9
    for query in range(2):
        assert len(rows(result, query)) == 4
        assert_best(rows(result, query), similarity[query])
        scores = [hit["score"] for hit in result["results"][query]["found"]]
        np.testing.assert_allclose(scores, -np.sort(-similarity[query])[:4], atol=1e-6)
    first = result["results"][0]["found"][0]
    assert set(first) == {"score", "row", "key", "video", "path", "begin_s", "end_s", "text"}


def test_a_search_by_example_needs_no_weights_and_leaves_the_example_out(embedded_clips: Path, search: Any) -> None:
    video = np.load(embedded_clips / "video.npy")
    similarity = video @ video[4]
    hits = rows(search(embedded_clips, "--like", 4, "--weights", "nowhere"))
    assert sorted(hits) == [row for row in range(9) if row != 4]
    assert_best([4, *hits], similarity)
    # A key identifies a clip if only one clip starts in this chunk.
    by_key = search(embedded_clips, "--like", "b_000002000", "--top", 3)
    assert by_key["results"][0]["like"]["row"] == 5 and 5 not in rows(by_key) and len(rows(by_key)) == 3


def test_chunks_without_captions_are_searched_by_text(run: Path, data_dir: Path, tmp_path: Path, search: Any) -> None:
    assert embed(run, data_dir, tmp_path / "chunks", "--clips", "chunks") == 0
    video = np.load(tmp_path / "chunks" / "video.npy")
    similarity = load_model(run, device="cpu").encode_text(["it begins"]).numpy() @ video.T
    hits = rows(search(tmp_path / "chunks", "it begins", "--top", 3))
    assert len(hits) == 3
    assert_best(hits, similarity[0])


def test_a_row_that_is_not_finite_is_named(
    embedded_clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(embedded_clips, tmp_path / "damaged")
    video = np.load(tmp_path / "damaged" / "video.npy")
    video[3, 1] = np.nan
    np.save(tmp_path / "damaged" / "video.npy", video)
    for like in ("0", "3"):
        assert "row 3 of" in error_of_search(capsys, tmp_path / "damaged", "--like", like)


def test_texts_and_examples_share_one_search(embedded_clips: Path, search: Any) -> None:
    both = search(embedded_clips, "it begins", "--like", 0, "--like", 8, "--top", 2)
    alone = [search(embedded_clips, *words, "--top", 2) for words in (("it begins",), ("--like", 0), ("--like", 8))]
    assert [rows(both, query) for query in range(3)] == [rows(result) for result in alone]


def test_pooled_features_are_searched_by_example(masked_run: Path, data_dir: Path, tmp_path: Path, search: Any) -> None:
    out = tmp_path / "pooled"
    assert embed(masked_run, data_dir, out) == 0
    video = np.load(out / "video.npy")
    video /= np.linalg.norm(video, axis=1, keepdims=True)
    hits = rows(search(out, "--like", 0, "--top", 3))
    assert len(hits) == 3
    assert_best([0, *hits], video @ video[0])


def test_the_console_has_a_line_per_clip(embedded_clips: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert train("search", embedded_clips, "it begins", "--top", 2, "--device", "cpu") == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "it begins" and len(lines) == 2
    assert all(re.match(rf"   {rank}  [ -]0\.\d{{3}}  [abc]_0\d+ ", line) for rank, line in enumerate(lines, start=1))
    assert all(re.search(r"  ([abc])_0.*  /videos/\1\.mp4$", line) for line in lines)


def test_folders_without_the_files_of_videos_are_searched(embedded_clips: Path, tmp_path: Path, search: Any) -> None:
    old = tmp_path / "old"
    shutil.copytree(embedded_clips, old)
    pq.write_table(pq.read_table(old / "clips.parquet").drop_columns(["path"]), old / "clips.parquet")
    record = json.loads((old / "embed.json").read_text())
    record["files"]["clips.parquet"]["size_bytes"] = (old / "clips.parquet").stat().st_size
    publish_checked_json(old / "embed.json", {name: value for name, value in record.items() if name != "sha256"})
    (result,) = search(old, "--like", 0, "--top", 2)["results"]
    assert [hit["path"] for hit in result["found"]] == [None, None]


def test_a_file_is_shown_without_the_query_of_its_address() -> None:
    clip = EmbeddedClip(0, "a_000000000", "a", 0.0, 1.0, None, "https://host/a.mp4?key=secret")
    assert clip.file == "https://host/a.mp4" and replace(clip, path="/what?.mp4").file == "/what?.mp4"


def error_of_search(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert train("search", *words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no query"),
        (["  "], "a query is empty"),
        (["it begins", ""], "a query is empty"),
        (["--like", "z_000000000"], "has no clip 'z_000000000'.*a key such as a_000000000"),
        (["--like", "9"], "has no clip '9'.*a row from 0 to 8"),
        (["it begins", "--shards", "elsewhere"], "has no effect without --page"),
        (["--like", "a_000000000"], r"2 clips start in chunk a_000000000.*0 \(0.00-1.00 s\), 1 \(1.20-2.80 s\)"),
        (["it begins", "--top", "0"], "--top 0 is less than 1"),
        (["it begins", "--weights", "nowhere"], "nowhere"),
        (["it begins", "--page", "no/page.html"], "there is no folder no"),
    ],
)
def test_a_query_that_cannot_be_answered_is_refused(
    embedded_clips: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], message: str
) -> None:
    assert re.search(message, error_of_search(capsys, embedded_clips, *words), re.DOTALL)


def test_texts_are_not_compared_with_embeddings_of_other_weights(
    embedded_clips: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert train("dual-encoder", "--shards", data_dir, "--out", other, *SMALL, "--seed", 1) == 0
    message = error_of_search(capsys, embedded_clips, "it begins", "--weights", other, "--device", "cpu")
    assert "does not contain the weights that computed the embeddings" in message


def test_folders_without_searchable_embeddings_are_refused(
    embedded_clips: Path, masked_run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of_search(capsys, tmp_path, "it begins")
    assert "holds no embeddings" in message and f"--out {tmp_path}-embedded" in message
    assert "there is no folder" in error_of_search(capsys, tmp_path / "nowhere", "it begins")
    unfinished, cut, damaged = tmp_path / "unfinished", tmp_path / "cut", tmp_path / "damaged"
    (unfinished / "parts").mkdir(parents=True)
    (unfinished / "parts" / "plan.json").write_text("{}")
    assert "are unfinished" in error_of_search(capsys, unfinished, "it begins")
    shutil.copytree(embedded_clips, cut)
    (cut / "video.npy").write_bytes((cut / "video.npy").read_bytes()[:-4])
    assert "bytes long, not" in error_of_search(capsys, cut, "it begins")
    (cut / "video.npy").unlink()
    assert "video.npy is missing" in error_of_search(capsys, cut, "it begins")
    shutil.copytree(embedded_clips, damaged)
    (damaged / "embed.json").write_text(
        (damaged / "embed.json").read_text().replace('"num_clips": 9', '"num_clips": 8')
    )
    assert "checksum does not match" in error_of_search(capsys, damaged, "it begins")
    pooled, tokens = tmp_path / "pooled", tmp_path / "tokens"
    assert embed(masked_run, data_dir, pooled) == embed(masked_run, data_dir, tokens, "--features", "tokens") == 0
    assert "holds pooled features" in error_of_search(capsys, pooled, "it begins")
    assert "holds all tokens" in error_of_search(capsys, tokens, "--like", "0")


def videos_of(page: str) -> list[bytes]:
    return [base64.b64decode(text) for text in re.findall(r'<video src="data:video/mp4;base64,([^"]+)"', page)]


def test_the_page_plays_the_clips_and_loads_nothing(
    embedded_clips: Path, run: Path, tmp_path: Path, search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "search.html"
    monkeypatch.chdir(embedded_clips.parent)
    result = search(embedded_clips.name, "<script>alert(1)</script> it begins", "--top", 9, "--page", path)
    page = path.read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    assert "default-src 'none'; img-src data:;" in page and "; media-src data:;" in page
    assert not re.findall(r'(?:src|href|poster)="(?!data:|#)', page)
    weights = load_model(run, device="cpu").description
    assert f"<dd>{weights}</dd>" in page and page.count(str(run)) == 1
    assert f"<dt>folder</dt><dd>{embedded_clips}</dd>" in page
    videos = videos_of(page)
    assert len(videos) == 9 and page.count('<span class="file">/videos/') == 9
    for hit, content in zip(result["results"][0]["found"], videos, strict=True):
        with av.open(io.BytesIO(content)) as container:
            assert isinstance(container, InputContainer)
            frames = list(container.decode(container.streams.video[0]))
            assert container.streams.video[0].codec_context.name == "h264"
        span_s = hit["end_s"] - hit["begin_s"]
        assert len(frames) == round(12 * span_s)
        first, last = (read_frame_number(frames[at].to_ndarray(format="gray")) for at in (0, -1))
        half_s = span_s / len(frames) / 2
        assert first == int(10 * (hit["begin_s"] + half_s)) and last == int(10 * (hit["end_s"] - half_s))


def test_the_page_names_clips_that_are_damaged_or_over_its_budget(
    embedded_clips: Path, data_dir: Path, tmp_path: Path, search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged, path = tmp_path / "damaged", tmp_path / "search.html"
    shutil.copytree(data_dir, damaged)
    overwrite_chunk(damaged, "b_000002000")
    monkeypatch.setattr(player, "_BUDGET_BYTES", 1)
    words = (embedded_clips, "it begins", "--top", 9, "--page", path, "--shards", damaged, "--device", "cpu")
    assert train("search", *words) == 1, "clips that are missing on the page are failures"
    page = path.read_text()
    # A single frame of one of the two clips in the damaged chunk lies in a different chunk.
    num_missing = page.count("not available: ")
    assert len(videos_of(page)) == 1 and num_missing in (1, 2)
    assert page.count('<img class="still"') == page.count("; shown as an image, because the videos") == 8 - num_missing
    # A page is replaced, but a different file is not.
    search(embedded_clips, "it begins", "--page", path)
    path.write_text("mine")
    with pytest.raises(AssertionError):
        search(embedded_clips, "it begins", "--page", path)
    assert path.read_text() == "mine"


def test_a_page_of_other_data_is_refused(
    embedded_clips: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, page = tmp_path / "other", tmp_path / "page.html"
    shutil.copytree(data_dir, other)
    write_captions(other, {"d": "train"}, [Caption("d", 0.0, 1.0, "it begins")])
    message = error_of_search(capsys, embedded_clips, "--like", "0", "--top", 3, "--page", page, "--shards", other)
    assert f"the embeddings in {embedded_clips} were not computed from {other}" in message
    assert "none of the videos in the results" in message
    assert not page.exists()


def test_long_clips_are_cut_and_it_is_said(
    embedded_clips: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(player, "_MAX_CLIP_S", 0.5)
    clip = open_embeddings(embedded_clips).clips([5])[0]
    shown = player.Player(str(data_dir), split="train").show(clip)
    assert shown.is_cut and shown.video.startswith("data:video/mp4;base64,") and not shown.missing


def test_texts_are_encoded_by_an_export_of_the_same_weights(
    embedded_clips: Path, run: Path, tmp_path: Path, search: Any
) -> None:
    out = tmp_path / "exported"
    assert train("export", run, "--format", "open_clip", "--out", out) == 0
    expected = search(embedded_clips, "the middle of a")
    assert search(embedded_clips, "the middle of a", "--weights", out)["results"] == expected["results"]
