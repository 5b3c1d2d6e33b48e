"""A run reads one variant of each column throughout, whichever is current; `--variant` selects one."""

import gc
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.manifests.errors import UserError
from clipmill.shards.dataset import current_variant, reading_variants, set_current_variant
from clipmill.shards.marks import READERS_FOLDER, list_readers, remove_unused_marks
from clipmill.train.data.interface import open_clips, read_clips
from clipmill.train.inference import load_model
from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder
from tests.object_storage.folders import upload
from tests.object_storage.server import S3Server
from tests.train.caption.conftest import DECODER
from tests.train.caption.conftest import SMALL as SMALL_CAPTIONER
from tests.train.running import SMALL, facts, train, two_lines, weights_of
from tests.train.tiny_data import VARIANT

OTHER = "h265-test-89abcdef"
RECIPES = {VARIANT: {"codec": "h264", "crf": 24, "len": "15s"}, OTHER: {"codec": "h265", "crf": 28, "len": "15s"}}
CAPTIONER = (*SMALL_CAPTIONER.split(), *DECODER.split())
STEPS = ("--steps", 2, "--checkpoint-every", 1, "--device", "cpu", "--workers", 1)


@pytest.fixture
def data(moving: Path, tmp_path: Path) -> Path:
    """Data folder with two variants of its chunks; the first one is current."""
    # The copy omits reader marks that earlier tests have not released yet.
    shutil.copytree(moving, tmp_path / "data", ignore=shutil.ignore_patterns(READERS_FOLDER))
    shutil.copytree(tmp_path / "data" / "video" / VARIANT, tmp_path / "data" / "video" / OTHER)
    for name, recipe in RECIPES.items():
        (tmp_path / "data" / "video" / name / "recipe.json").write_text(json.dumps(recipe))
    return tmp_path / "data"


def variant_of(run: Path) -> Any:
    return facts(run)["variant"]


def forget_last_step(run: Path) -> None:
    shutil.rmtree(all_checkpoints(RunFolder(run).checkpoints)[2])


def test_a_run_is_resumed_and_evaluated_on_its_own_variant(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert train("dual-encoder", *SMALL, *STEPS, "--shards", data, "--out", whole) == 0
    shutil.copytree(whole, run)
    forget_last_step(run)
    set_current_variant(data, "video", OTHER)
    assert train("dual-encoder", "--resume", "--out", run) == 0
    assert variant_of(run) == VARIANT and current_variant(data, "video") == OTHER
    expected = weights_of(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(run).items())
    capsys.readouterr()
    assert train("eval", "retrieval", run, "--json") == 0
    assert f'"variant": "{VARIANT}"' in capsys.readouterr().out

    shutil.rmtree(data / "video" / VARIANT)
    assert train("eval", "retrieval", run, "--json") == 0
    output = capsys.readouterr()
    assert f"note: {run} was made with variant {VARIANT} of video, which {data} no longer has; the" in output.err
    assert f"the current variant {OTHER} is used instead" in output.err
    assert f'"variant": "{OTHER}"' in output.out
    forget_last_step(run)
    assert train("dual-encoder", "--resume", "--out", run) == 2
    error, hint = two_lines(capsys)
    assert f"variant {VARIANT} of video, which {data} no longer has; the current variant is {OTHER}" in error
    settings = "codec h264 (now h265), crf 24 (now 28)"
    assert f"prep chunk --data {data}, with the settings of the current variant, except {settings}; or" in hint
    assert "--out" in hint

    # The current variant in the data folder is the one whose folder was deleted.
    set_current_variant(data, "video", VARIANT)
    assert train("dual-encoder", "--resume", "--out", run) == 2
    error, hint = two_lines(capsys)
    assert f"variant {VARIANT} of video, which {data} no longer has; the current variant is missing" in error
    assert "make the variant again" in hint and "the current variant" not in hint
    assert train("eval", "retrieval", run) == 2
    assert "is used instead" not in capsys.readouterr().err


def test_a_variant_is_chosen_by_name(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    command = ("dual-encoder", *SMALL, *STEPS, "--shards", data, "--out", run, "--variant")
    assert train(*command, "h264-none") == 2
    assert "--variant h264-none: there is no such variant in" in two_lines(capsys)[0] and not run.exists()
    assert train(*command, OTHER) == 0
    assert variant_of(run) == OTHER and current_variant(data, "video") == VARIANT
    forget_last_step(run)
    assert train("dual-encoder", "--resume", "--out", run) == 0
    assert variant_of(run) == OTHER

    # Evaluations and embeddings accept the flag, also for other data, and a result states its variant.
    evaluate = ("eval", "retrieval", run, "--json")
    other = shutil.copytree(data, tmp_path / "other")
    capsys.readouterr()
    for place in ((), ("--shards", other)):
        assert train(*evaluate, *place, "--variant", OTHER if place else VARIANT) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["variant"] == (OTHER if place else VARIANT)
        assert f"--variant {result['variant']}" in result["command"] and result["overrides"]["variant"]
    assert train(*evaluate, "--variant", "h264-none") == 2
    assert "--variant h264-none: there is no such variant in" in two_lines(capsys)[0]
    assert len(list((run / "evaluations").glob("*-variant-*.json"))) == 2
    assert train("embed", run, "--out", tmp_path / "embedded", "--device", "cpu", "--variant", VARIANT) == 0
    assert f"; {VARIANT}" in capsys.readouterr().out


def test_refused_resume_leaves_the_run_as_it_was(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "run", data / "video" / OTHER
    assert train("dual-encoder", *SMALL, *STEPS, "--shards", data, "--out", run) == 0
    forget_last_step(run)
    for path in (max((other / "commits").iterdir()), *other.glob("c*.arrow")):
        path.unlink()  # this variant has other samples
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert train("dual-encoder", "--resume", "--out", run, "--variant", OTHER) == 2
    error, hint = two_lines(capsys)
    assert "belongs to other samples" in error and "--variant" in hint
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert train("dual-encoder", "--resume", "--out", run) == 0
    assert variant_of(run) == VARIANT
    # Without the record of its variants, a run neither continues nor is evaluated on the current variants.
    content = RunFolder(run).facts.read_bytes()
    for lost in (None, b"{}"):
        RunFolder(run).facts.unlink() if lost is None else RunFolder(run).facts.write_bytes(lost)
        for words in (("dual-encoder", "--resume", "--out", run), ("eval", "retrieval", run)):
            assert train(*words) == 2
            assert "run.json" in two_lines(capsys)[0]
    RunFolder(run).facts.write_bytes(content)
    assert train("eval", "retrieval", run) == 0


def test_a_variant_whose_recipe_is_damaged_is_not_trained_on(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = data / "video" / VARIANT / "recipe.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert train("dual-encoder", *SMALL, *STEPS, "--shards", data, "--out", tmp_path / "run") == 2
    assert "recipe.json cannot be read" in two_lines(capsys)[0]


@pytest.mark.nightly
def test_a_variant_in_a_bucket_is_chosen_by_name(data: Path, s3: S3Server, bucket: str, tmp_path: Path) -> None:
    upload(data, bucket)
    run, cache = tmp_path / "run", tmp_path / "cache"
    where = ("--shards", f"{bucket}", "--cache", cache, "--out", run)
    assert train("dual-encoder", *SMALL, *STEPS, *where, "--variant", OTHER) == 0
    assert variant_of(run) == OTHER


@pytest.mark.nightly
def test_clips_are_embedded_captioned_and_shown_from_the_variant_of_the_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, captioner, out = tmp_path / "run", tmp_path / "captioner", tmp_path / "embedded"
    assert train("dual-encoder", *SMALL, *STEPS, "--shards", data, "--out", run) == 0
    assert train("caption", *CAPTIONER, *STEPS, "--shards", data, "--out", captioner) == 0
    set_current_variant(data, "video", OTHER)
    captions = ("caption-chunks", captioner, "--device", "cpu", "--method", "greedy", "--json")
    capsys.readouterr()

    # For the run's own data, the commands use the run's variant, whether or not --shards is given.
    assert train("embed", run, "--out", out, "--device", "cpu") == 0
    assert f"; {VARIANT}" in capsys.readouterr().out
    assert train("embed", run, "--out", out, "--device", "cpu", "--shards", data) == 0
    assert f"nothing to do: {out} is finished" in capsys.readouterr().out
    assert train(*captions, "--shards", data, "--out", tmp_path / "of_run.parquet") in (0, 1)
    assert f'"video_variant": "{VARIANT}"' in capsys.readouterr().out
    # The page shows the embedded chunks, because the chunks of the current variant cannot be read here.
    for shard in (data / "video" / OTHER).glob("*.tar"):
        shard.write_bytes(b"")
    search = ("search", out, "--like", "0", "--top", "1", "--page", tmp_path / "page.html")
    assert train(*search) == 0 and "data:video/mp4" in (tmp_path / "page.html").read_text()

    # Other data use their current variant. If a variant is missing, the message names it and its replacement.
    other = shutil.copytree(data, tmp_path / "other")
    assert train(*captions, "--shards", other, "--out", tmp_path / "of_other.parquet") == 1
    shutil.rmtree(data / "video" / VARIANT)
    capsys.readouterr()
    for command in (search, ("embed", run, "--out", tmp_path / "again", "--device", "cpu")):
        assert train(*command) == 1
        text = "".join(capsys.readouterr())
        made = out if command == search else run
        assert f"note: {made} was made with variant {VARIANT} of video, which {data} no longer has; the" in text
        assert f"the current variant {OTHER} is used instead" in text


def test_a_choice_ends_with_its_command(data: Path) -> None:
    with reading_variants({data: {"video": OTHER}}):
        assert current_variant(data, "video") == OTHER
    assert current_variant(data, "video") == VARIANT


def test_a_variant_that_was_looked_at_stays_within_its_command(data: Path) -> None:
    with reading_variants({}):
        assert current_variant(data, "video") == VARIANT
        set_current_variant(data, "video", OTHER)
        assert current_variant(data, "video") == VARIANT
    assert current_variant(data, "video") == OTHER


def test_a_caller_in_python_names_a_variant_and_keeps_it_as_long_as_its_batches(data: Path) -> None:
    def read_variants() -> list[str]:
        gc.collect()
        remove_unused_marks()
        return [(reader.variants or {})["video"] for reader in list_readers(data).active]

    for open_data in (open_clips, partial(read_clips, table={"video_id": ["v0"], "time_s": [0.0]})):
        with pytest.raises(UserError, match="variant h264-none: there is no such variant"):
            open_data(data, variant="h264-none")  # type: ignore[operator]
    batches = open_clips(data, variant=OTHER, batch=2, num_frames=2, size_px=32, workers=1, shuffle=False)
    assert read_variants() == [OTHER]
    next(iter(batches))
    batches.close()
    assert read_variants() == [OTHER], "the batches can be iterated again"
    del batches
    assert read_variants() == []


@pytest.mark.nightly
def test_a_model_in_python_and_evaluated_data_keep_the_variants_of_the_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, run = shutil.copytree(data, tmp_path / "other"), tmp_path / "run"
    evaluate = ("--evaluate.every", 1, "--evaluate.shards", f"own={data}", f"other={other}")
    assert train("dual-encoder", *SMALL, *STEPS, "--shards", data, "--out", run, *evaluate) == 0
    for folder in (data, other):
        set_current_variant(folder, "video", OTHER)
    samples = load_model(run).samples("val")
    assert samples.variant_name == VARIANT and len(list(samples.evaluation_batches())) > 0
    assert load_model(run, shards=str(other)).samples("val").variant_name == OTHER

    forget_last_step(run)
    assert train("dual-encoder", "--resume", "--out", run) == 0
    assert [evaluation["variant"] for evaluation in facts(run)["evaluations"].values()] == [VARIANT, VARIANT]
    forget_last_step(run)
    shutil.rmtree(other / "video" / VARIANT)
    capsys.readouterr()
    assert train("dual-encoder", "--resume", "--out", run) == 0
    assert f"variant {VARIANT} of video, which {other} no longer has" in capsys.readouterr().err
    assert facts(run)["evaluations"]["other"]["variant"] == OTHER
