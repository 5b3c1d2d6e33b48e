"""Tests of the caption column as a source for training, as fields of `--where`, and on the page of chunks."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq

from clipmill.manifests.caption_table import METADATA_KEY, SCHEMA
from clipmill.manifests.store import read_captions
from tests.prep.captions.server import Request, completion, run_server
from tests.prep.captions.test_endpoint import NUM_CHUNKS, make, rows, variant_of
from tests.prep.running import Ran, prep_here
from tests.prep.sets import LEN, ShardSet, rerun


def of_source(data: Path) -> dict[tuple[str, float], tuple[int, str]]:
    captions = read_captions(data).to_pylist()
    return {
        (row["video_id"], row["begin_s"]): (row["caption_id"], row["text"])
        for row in captions
        if str(row["source"]).startswith("vlm@")
    }


def test_captions_become_a_source_that_is_stale_when_the_column_or_the_chunks_change(
    shard_set: ShardSet, prep: Callable[..., Ran], tmp_path: Path
) -> None:
    data = shard_set.data
    with run_server() as server:
        made = make(data, server).summary
        add = made["next"].split()
        table = Path(add[3])
        assert add[:3] == ["prep", "manifest", "captions"] and table.name == "captions.parquet"
        record = json.loads(pq.read_schema(table).metadata[METADATA_KEY])
        assert pq.read_schema(table).remove_metadata() == SCHEMA
        assert (record["weights"], record["captions_variant"]) == ("stub-vl", made["variant"])
        assert "5 captions (5 new)" in prep_here(*add[1:]).stdout
        ids = of_source(data)
        assert sorted(text for _, text in ids.values()) == sorted(row["caption_text"] for row in rows(data).values())
        name = f"vlm@{made['variant'][-8:]}"
        assert "stale" not in prep_here("status", "--data", data, status=None).stdout
        rerun(prep, shard_set, *LEN)  # captions in the tars change, but the chunks do not
        assert make(data, server).summary["num_shards_made"] == 0
        prep_here("inspect", "--html", tmp_path / "chunks.html", "--data", data)
        page = (tmp_path / "chunks.html").read_text()
        assert page.count("frames of brightness") == page.count('"badge">model') == NUM_CHUNKS, (
            "each caption is shown once"
        )

        server.script = lambda request, number: completion(f"other {number}", request)
        make(data, server, "--prompt", "Other")
        status = prep_here("status", "--data", data, status=None).stdout
        assert f"{name}" in status and 'the current variant of the column "captions" is' in status
        assert (
            "5 captions (5 new)"
            in prep_here("manifest", "captions", variant_of(data).directory / table.name, "--data", data).stdout
        )
        assert name not in prep_here("status", "--data", data, status=None).stdout, "the old variant is still listed"

        rerun(prep, shard_set, *LEN, "--crf", 30)
        assert "stale: the captions describe chunks of" in prep_here("status", "--data", data, status=None).stdout
    removed = prep_here("manifest", "captions", "--remove", "vlm", "--data", data, "--json").summary
    assert sum(removed["num_captions_removed"].values()) == NUM_CHUNKS and not of_source(data)


def test_a_changed_column_makes_its_source_stale_and_keeps_the_ids_of_what_has_not(shard_set: ShardSet) -> None:
    data = shard_set.data

    def refuses_one(request: Request, number: int) -> dict[str, object]:
        return completion(f"caption {number}", request, refusal="no" if number == 2 else None)

    with run_server(refuses_one) as server:
        made = make(data, server, "--in-flight", 1, status=1).summary
        add = ("manifest", "captions", variant_of(data).directory / "captions.parquet", "--data", data)
        assert "4 captions (4 new)" in prep_here(*add).stdout
        before = of_source(data)
        prep_here("retry", "--column", "captions", "--engine", "processes", "--data", data)
        assert variant_of(data).directory.name == made["variant"]
        stale = 'stale: the column "captions" has changed since'
        assert stale in prep_here("status", "--data", data, status=None).stdout
        assert "5 captions (1 new)" in prep_here(*add).stdout
    assert before.items() <= of_source(data).items()
    (variant_of(data).directory / "captions.parquet").write_bytes(b"PAR1")
    assert "captions.parquet is damaged" in prep_here("verify", "--data", data, status=1).stdout
    with run_server() as server:
        make(data, server)
        assert not server.log
    assert "OK" in prep_here("verify", "--column", "captions", "--data", data).stdout


def test_where_and_the_page_of_chunks_know_the_captions(shard_set: ShardSet, tmp_path: Path) -> None:
    data, page = shard_set.data, tmp_path / "chunks.html"

    def answer_by_number(request: Request, number: int) -> dict[str, object]:
        return completion(f"<b>{'word ' * (number + 1)}</b> end", request)

    with run_server(answer_by_number) as server:
        make(data, server, "--in-flight", 1)
    texts = [row["caption_text"] for row in rows(data).values()]
    assert sorted(len(text.split()) for text in texts) == [3, 4, 5, 6, 7]
    ran = prep_here("inspect", "--html", page, "--where", "caption_words > 4", "--data", data)
    assert "3 chunks" in ran.stdout
    shown = page.read_text()
    assert "word word word word word " in shown and "<b>word" not in shown and "&lt;b&gt;word" in shown
    chosen = ("prep", "--data", data, "--where", "caption_words > 4 and contains(caption_text, 'word')")
    planned = prep_here("plan", "latents", "--vae", "tiny", *chosen[1:]).stdout
    assert "3 chunks selected" in planned
    with run_server() as server:
        picked = make(data, server, "--prompt", "More", "--where", "caption_words > 4").summary
        assert picked["num_chunks"] == 3 == len(server.log)
