"""Tests of what the commands of a data folder report about a column, and of the flags that they repeat."""

from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.prep.core import make
from clipmill.prep.core.recipe import KEPT, marked_fields
from clipmill.prep.core.variants import stored_request
from clipmill.shards.reader import Variant
from tests.prep.columns.cases import CASES, ROWS, Case, Folder, with_tiers
from tests.prep.latents.video_vaes import save_model

VALUES: dict[type, object] = {int: 1000, float: 30.5, str: "1GB"}  # values of flags, by type
SELECTING = [case for case in CASES if case.where]


def test_status_verify_and_inspect_know_the_column(folder: Folder) -> None:
    case, spec = folder.case, folder.case.spec
    status = folder.status()
    assert (status["current"], status["problems"], status["to_make"]) == (folder.current_name, [], {})
    (variant,) = status["variants"]
    assert (variant["num_samples"], variant["num_wanted"], variant["num_shards"]) == (*[case.num_samples] * 2, 2)
    files = (path for path in (folder.column / folder.current_name).rglob("*") if path.is_file())
    assert variant["size_bytes"] == sum(path.stat().st_size for path in files)
    assert not spec.has_hours or variant["hours"] * 3600 == pytest.approx(8.0)
    counted = f"{case.num_samples} {spec.sample}s in 2 shards"
    assert counted in folder.prep("status").stdout
    verified = folder.prep("verify", "--deep", "--column", case.name).stdout
    assert len(verified.splitlines()) == 1
    assert counted in verified and f"{spec.checked_noun}s: OK" in verified
    listed = folder.prep("inspect", "--column", case.name, "--json").summary
    assert [(row["split"], row["state"]) for row in listed["shards"]] == [("train", "committed"), ("val", "committed")]
    assert counted in folder.prep("inspect", "--column", case.name).stdout
    shard = folder.variant.shards()[1]
    key = shard.index["key"][0].as_py()
    sample = folder.prep("inspect", key, "--column", case.name, "--json").summary
    assert sample["key"] == key and set(sample["members"]) == {*shard.extensions}
    unknown = folder.prep("inspect", f"{key[:-1]}9x", "--column", case.name, status=2)
    assert key in unknown.stderr
    assert "nothing to remove" in folder.prep("gc").stdout


def test_a_stored_variant_is_made_again_by_its_command_line(folder: Folder) -> None:
    spec, stored = folder.case.spec, stored_request(folder.variant)
    flags = [folder.server.address if flag == "SERVER" else flag for flag in folder.case.flags]
    assert spec.flags(stored) == list(map(str, flags))
    line = spec.command_line(stored, data_dir=folder.data)
    made = folder.run_printed(line)
    assert made["num_shards_made"] == 0
    assert made["total_video_s"] == (pytest.approx(8.0) if spec.has_hours else None)
    with pytest.raises(UserError, match="schema 99"):
        spec.flags({**stored, "schema": 99})


def test_a_retry_repeats_every_flag_that_is_kept(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = folder.case.spec
    kinds = marked_fields(spec.request_type, KEPT)
    assert kinds.keys() >= folder.case.kept, "a retry would omit a flag"
    values = {name: VALUES[kind] for name, kind in kinds.items()}
    folder.make(*(word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)))
    folder.variant.shards()[1].tar_path.unlink()
    requests: list[Any] = []
    make_column = make.make_column

    def note_request(column: Any, settings: Any, request: Any) -> None:
        requests.append(request)
        make_column(column, settings, request)

    monkeypatch.setattr(make, "make_column", note_request)
    assert folder.retry()["num_shards_made"] == 1
    folder.retry("--scratch-size", "2GB", "--in-flight", 7)
    changed = {"scratch_size": "2GB", "in_flight": 7}
    for request, expected in zip(requests, (values, {**values, **changed}), strict=True):
        assert {name: getattr(request, name) for name in values} == {name: expected[name] for name in values}
    kept = spec.kept_flags(stored_request(folder.variant))
    assert kept == {name: {**values, **changed}[name] for name in values}


@pytest.mark.parametrize("case", with_tiers(case for case in CASES if case.other), ids=str)
def test_a_retry_works_on_the_variant_that_failed_or_on_the_one_that_is_named(folder: Folder, case: Case) -> None:
    folder.read_manifest()
    first = folder.current_name
    with folder.broken_chunk():
        failed = folder.make(*case.other, status=1)
    assert failed["variant"] != first and failed["failures"] == {case.code: 1}
    retried = folder.retry()
    assert (retried["variant"], retried["num_shards_made"], retried["failures"]) == (failed["variant"], 1, {})
    assert folder.current_name == failed["variant"]
    assert folder.retry("--variant", first)["variant"] == first
    missing = folder.prep("retry", "--column", case.name, "--variant", "none", status=2).stderr
    assert first in missing and failed["variant"] in missing


@pytest.mark.parametrize("case", with_tiers(SELECTING), ids=str)
def test_a_condition_selects_and_is_repeated_and_another_one_makes_the_rest(folder: Folder, case: Case) -> None:
    whole, variant = folder.digests(), folder.current_name
    folder.forget_column()
    where = ("--where", case.where)
    planned = folder.plan(*where, "--json").summary
    made = folder.make(*where)
    assert planned["shards"] == {"new": 1} and made["num_shards_made"] == 1
    assert {shard.shard_id for shard in folder.variant.shards()} == {1}
    assert folder.make(*where)["num_shards_made"] == 0 and folder.status()["variants"][0]["where"] == case.where
    stored = stored_request(folder.variant)
    assert stored["where"] == case.where and "where" not in folder.variant.recipe
    folder.variant.shards()[0].tar_path.unlink()
    assert folder.run_printed(folder.prep("status", status=1).stderr)["num_shards_made"] == 1
    assert {shard.shard_id for shard in folder.variant.shards()} == {1}, "the printed command selects other samples"
    (folder.column / variant / "selection.json").write_text('{"where": "begin_s > 2", "sha256": "00"}')
    with pytest.raises(UserError, match=r"selection\.json is damaged"):
        stored_request(Variant(folder.column / variant))
    assert "selection.json is damaged" in folder.prep("verify", "--column", case.name, status=1).stdout
    folder.server.log.clear()
    wider = folder.make()
    assert (wider["variant"], wider["num_shards_made"]) == (variant, 1) and folder.digests() == whole


@pytest.mark.parametrize(
    "case", with_tiers(case for case in CASES if case.name in ("video", "latents", "text")), ids=str
)
def test_what_is_left_out_is_counted_by_plan_run_and_status(folder: Folder, case: Case, tmp_path: Path) -> None:
    settings = {
        "video": (*case.flags, "--tail", "drop"),
        "latents": ("--vae", tmp_path / "vae", "--size", 32, "--fps", 6, "--segment", "9f"),
        "text": case.flags,
    }[case.name]
    if case.name == "latents":
        save_model("AutoencoderKLWan", tmp_path / "vae")
    if case.name == "text":
        folder.read_manifest(*ROWS[:2])
    planned, made = folder.plan("--json", settings=settings).summary, folder.make(settings=settings)
    for values in (planned, made):
        numbers = {
            "video": lambda of: (of["num_left_out"], of["left_out_s"]) == (2, 2.0),
            "latents": lambda of: (of.get("segments") or {"left_out_s": of["left_out"]["seconds"]})["left_out_s"] > 0,
            "text": lambda of: of["num_left_out"] == 1,
        }[case.name]
        assert numbers(values), values
    lines = [line for variant in folder.status()["variants"] if variant["is_current"] for line in variant["left_out"]]
    assert lines, "prep status does not report the omitted samples"
    again = folder.prep(case.command, *settings, "--engine", "processes").stdout
    for line in lines:
        assert all(
            line in text for text in (again, folder.plan(settings=settings).stdout, folder.prep("status").stdout)
        )
