"""Tests of the contract of a column with one sample per chunk: what its `make` may yield, and what follows from it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, make_dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from cyclopts import App, Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import Range
from clipmill.prep.core.chunk_input import Chunk, Chunks, chunks_of_shard
from clipmill.prep.core.chunk_work import ChunkWork
from clipmill.prep.core.column import RESERVED_NAMES, CheckedSample, ColumnSpec
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.recipe import NOT_STORED, STORED_IF_CHANGED, Recipe, setting_flags, settings_from, stored_values
from clipmill.prep.core.request import PartRequest, PlanRequest
from clipmill.prep.core.run import Summary
from clipmill.prep.core.shard_result import Stop
from clipmill.prep.core.variants import stored_request
from clipmill.prep.core.work import usable_works, work_of
from clipmill.shards.column_fields import ColumnFields
from clipmill.shards.dataset import current_variant
from clipmill.shards.format import chunk_fields
from clipmill.shards.npy import npy_bytes
from clipmill.shards.reader import Variant
from clipmill.shards.selection import stored_rows
from clipmill.shards.writer import Sample
from tests.conftest import ROOT
from tests.plugins import declare, installed_here
from tests.prep.here import make_here
from tests.prep.sets import ShardSet
from tests.tiers import nightly_beyond


@dataclass(frozen=True, kw_only=True)
class LengthsSettings:
    """Settings of a column that stores the lengths of chunks."""

    unit: str = "frames"
    where: Annotated[str | None, NOT_STORED] = None
    how: Annotated[str, NOT_STORED] = "as told"
    effort: Annotated[int, NOT_STORED, Range(least=1)] = 1


def make_lengths(chunks: Chunks, recipe: Recipe[LengthsSettings]) -> Iterator[Sample | SourceFailure | Stop]:
    how, samples = recipe.settings.how, []
    if how == "no model":
        raise UserError("the model is not here", hint="bring it")
    for number, chunk in enumerate(chunks):
        value = float("nan") if how == "not finite" and not number else float(chunk["num_frames"])
        try:
            samples.append(chunk.sample({"txt": recipe.settings.unit.encode()}, {"lengths_value": value}))
        except SourceFailure as failure:
            yield failure
            continue
        if how == "stop":
            yield Stop(FailureCode.BUDGET_SPENT, "no more")
        if how != "reversed":
            yield samples[-1]
    yield from reversed(samples) if how == "reversed" else ()


def check(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    return CheckedSample([], 1)


WORK = ChunkWork(fields=chunk_fields(pa.field("lengths_value", pa.float64())), extension="txt", make=make_lengths)
COLUMN = ColumnSpec(
    name="lengths",
    package="tests",
    work=f"{__name__}:WORK",
    check_sample=f"{__name__}:check",
    settings=LengthsSettings,
    schema=1,
    help="Measure how long the chunks are.",
    has_hours=False,
)


FIELDS = ColumnFields(name="lengths", fields={"lengths_value": pa.float64()})
LACKING_FIELDS = ColumnFields(name="lengths", fields={"lengths_value": pa.float64(), "lengths_most": pa.float64()})
OTHER_FIELDS = ColumnFields(name="lengths", fields={"lengths_value": pa.string()})


def failures(summary: Summary) -> dict[str, int]:
    return summary.failures_by_code()


def test_a_setting_that_is_not_stored_keeps_the_variant_and_its_samples(shard_set: ShardSet) -> None:
    made = make_here(COLUMN, shard_set.data)
    again = make_here(COLUMN, shard_set.data, how="reversed", effort=3)
    assert stored_request(Variant.open(shard_set.data, column="lengths"))["effort"] == 3
    other = make_here(COLUMN, shard_set.data, unit="seconds")
    assert (made.num_encoded, again.num_shards_made, other.num_encoded) == (5, 0, 5)
    assert made.variant == again.variant != other.variant
    variant = Variant.open(shard_set.data, column="lengths")
    assert dict(variant.recipe) == {
        **{"unit": "seconds", "schema": 1, "column": "lengths"},
        "video": current_variant(shard_set.data, "video"),
    }
    assert COLUMN.flags(stored_request(variant)) == ["--unit", "seconds"]
    assert work_of(COLUMN).pending(shard_set.data, variant).to_make == {}
    newer = replace(COLUMN, schema=2)
    assert (
        work_of(newer).pending(shard_set.data, variant).stale_because == "made with schema 1; this version has schema 2"
    )
    with pytest.raises(UserError, match="lacks 'unit'"):
        COLUMN.flags({name: value for name, value in variant.recipe.items() if name != "unit"})
    with pytest.raises(UserError, match="has schema 2, but this version supports 1"):
        COLUMN.flags({**variant.recipe, "schema": 2})


def test_a_condition_selects_chunks_and_is_recorded(shard_set: ShardSet) -> None:
    where = "split = 'val'"
    assert make_here(COLUMN, shard_set.data, where=where).num_chunks == 2
    variant = Variant.open(shard_set.data, column="lengths")
    assert stored_request(variant)["where"] == where and "where" not in variant.recipe


def test_a_value_that_is_not_finite_fails_its_chunk_alone(shard_set: ShardSet) -> None:
    made = make_here(COLUMN, shard_set.data, how="not finite")
    assert (made.num_chunks, failures(made)) == (3, {"not_finite": 2}), "the first chunk of each shard must fail"
    listed = shard_set.data / "lengths" / made.variant / "failures.jsonl"
    text = work_of(COLUMN).summary_report(made, LengthsSettings(), listed).text
    assert f"then run prep retry --column lengths --data {shard_set.data}\n" in text
    assert "lengths_value: not a finite number" in text


def test_a_failed_chunk_waits_for_somebody_to_ask_and_its_neighbours_are_copied(shard_set: ShardSet) -> None:
    make_here(COLUMN, shard_set.data, how="not finite")
    for codes, num_made in ((frozenset(), 0), (frozenset({"timeout"}), 0), (frozenset({"not_finite"}), 2)):
        made = make_here(COLUMN, shard_set.data, retry_codes=codes)
        assert made.num_shards_made == num_made
    assert (made.num_encoded, made.num_reused, failures(made)) == (2, 3, {})


ARRAY = npy_bytes(np.zeros(1))


def array_sample(chunk: Chunk, **values: Any) -> Sample:
    return chunk.sample({"npy": ARRAY}, {"lengths_value": 1.0, **values})


WRONG: dict[str, tuple[Callable[[Chunk], Any], str]] = {
    "raises": (lambda chunk: 1 / 0, "ZeroDivisionError: division by zero (test_chunk_contract.py, line"),
    "none": (lambda chunk: None, "an object of type NoneType, which is neither a Sample nor a SourceFailure"),
    "field": (lambda chunk: chunk.sample({"npy": ARRAY}, {"lengths_other": 1.0}), "lengths_other"),
    "member": (lambda chunk: chunk.sample({"txt": b""}, {"lengths_value": 1.0}), "members ['txt'], expected ['npy']"),
    "type": (lambda chunk: array_sample(chunk, lengths_value="red"), "Could not convert 'red'"),
    "video": (lambda chunk: array_sample(chunk, video_id="another"), "video_id is 'another', but the chunk has"),
    "start": (lambda chunk: array_sample(chunk, start_ms=77), "start_ms is 77, but the chunk has"),
    "fraction": (lambda chunk: array_sample(chunk, num_frames=2.5), "num_frames is 2.5, which is not an integer"),
    "negative": (lambda chunk: array_sample(chunk, num_frames=-5), "num_frames is -5, but must be 1 or more"),
    "no array": (lambda chunk: chunk.sample({"npy": b"x"}, {"lengths_value": 1.0}), "npy"),
    "array": (lambda chunk: chunk.sample({"npy": npy_bytes(np.array([np.nan]))}, {"lengths_value": 1.0}), "finite"),
}


def make_arrays(chunks: Chunks, recipe: Recipe[LengthsSettings]) -> Iterator[Sample | SourceFailure | Stop]:
    """Make a sample of each chunk, and a wrong outcome for the first chunk of each shard."""
    how = recipe.settings.how
    if how == "no generator":
        return None  # type: ignore[return-value]
    first = next(iter(chunks)).key
    wrong = WRONG.get(how, (array_sample, ""))[0]
    samples = chunks.each(lambda chunk: wrong(chunk) if chunk.key == first else array_sample(chunk))
    if how == "fewer":
        return islice(samples, 1)
    return chain(samples, [array_sample(next(iter(chunks)))] if how == "more" else ())


ARRAYS = replace(COLUMN, name="arrays", work=f"{__name__}:ARRAYS_WORK")
ARRAYS_WORK = ChunkWork(
    fields=chunk_fields(pa.field("num_frames", pa.int32()), pa.field("lengths_value", pa.float64())),
    extension="npy",
    make=make_arrays,
)


@pytest.mark.parametrize("how", nightly_beyond(["none", "raises", "array", "field", "start"], WRONG))
def test_an_outcome_that_is_no_sample_of_its_chunk_is_a_failure_of_this_chunk(shard_set: ShardSet, how: str) -> None:
    made = make_here(ARRAYS, shard_set.data, how=how)
    assert made.num_chunks == 3 and len(made.failures) == 2, "the first chunk of each shard must fail"
    assert {failure.code for failure in made.failures} == {"not_finite" if how == "array" else "column_error"}
    assert all(WRONG[how][1] in failure.message for failure in made.failures), made.failures
    assert "long_000000000" in {failure.key for failure in made.failures}
    # Run again with corrected code.
    again = make_here(ARRAYS, shard_set.data, how="right", retry_codes=frozenset({made.failures[0].code}))
    assert (again.num_chunks, again.num_encoded, again.failures) == (5, 2, [])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fewer", "yielded outcomes for only 1 of"),
        ("more", "yielded more outcomes than there are chunks"),
        ("no generator", "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_shard_with_another_number_of_outcomes_is_not_committed(shard_set: ShardSet, how: str, message: str) -> None:
    made = make_here(ARRAYS, shard_set.data, how=how)
    assert made.num_shards == 0 and set(failures(made)) == {"column_error"}
    assert all(message in failure.message for failure in made.failures), made.failures
    assert not list((shard_set.data / "arrays").rglob("*.tar"))
    assert make_here(ARRAYS, shard_set.data, how="right").num_chunks == 5, (
        "failures must be tried again without prep retry"
    )


@pytest.mark.parametrize("name", ["video", "column", "schema", "workers", "data", "json"])
def test_settings_have_no_name_that_all_columns_use(name: str) -> None:
    with pytest.raises(ValueError, match=f"has a setting '{name}', which is a reserved name"):
        replace(COLUMN, settings=make_dataclass("Settings", [(name, str, "a")], frozen=True))


def test_flags_of_all_columns_are_taken() -> None:
    flags = {field.name for kind in (PartRequest, PlanRequest) for field in fields(kind)}
    # Flags of columns with a model, and of video.
    assert flags - RESERVED_NAMES == {"num_gpus", "batch", "scratch_size"}


@pytest.mark.parametrize(
    ("change", "message"), [({"settings": 3}, "not a dataclass"), ({"schema": "1"}, "not an integer")]
)
def test_a_spec_is_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        replace(COLUMN, **change)


@pytest.mark.parametrize(
    ("change", "message"), [({"fields": []}, "chunk_fields"), ({"extension": "Bad.NPY"}, "lower-case letters")]
)
def test_work_is_checked_before_anything_is_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(WORK, **change)


def test_work_that_cannot_be_used_is_named_with_its_package() -> None:
    broken = replace(COLUMN, work="tests.prep.test_chunk_contract:NOWORK")
    with pytest.raises(UserError, match=r"the column lengths cannot be used: .*NOWORK: AttributeError") as error:
        work_of(broken)
    assert error.value.hint == "repair or uninstall the package tests"
    assert len(list(usable_works([COLUMN, broken, ARRAYS]))) == 2


@dataclass(frozen=True, kw_only=True)
class KindsSettings:
    """Settings with one field of each type."""

    on: bool = True
    off: bool = False
    count: int = 1
    share: float = 0.5
    word: str = "a"
    choice: Literal["a", "b"] = "a"
    limit: int | None = None


@pytest.mark.parametrize(
    "changed",
    [{"on": False}, {"off": True}, {"count": 3}, {"share": 0.1}, {"word": "b c"}, {"choice": "b"}, {"limit": 4}],
)
def test_a_setting_of_each_type_comes_back_from_its_flags_and_from_its_recipe(changed: dict[str, Any]) -> None:
    app, settings = App(), KindsSettings(**changed)

    @app.default
    def settings_given(settings: Annotated[KindsSettings, Parameter(name="*")] = KindsSettings()) -> KindsSettings:
        return settings

    assert app(setting_flags(settings), exit_on_error=False, result_action="return_value") == settings
    stored = json.loads(json.dumps({"column": "kinds", "schema": 1, "video": "v", **stored_values(settings)}))
    assert settings_from(stored, KindsSettings, column="kinds", schema=1) == settings


def test_a_package_that_is_not_installed_is_named_before_workers_start(shard_set: ShardSet) -> None:
    with pytest.raises(UserError, match="not_there of the column is not installed on this machine") as error:
        make_here(replace(COLUMN, package="not_there"), shard_set.data)
    assert "correct `package`, its import name, in the ColumnSpec" in str(error.value.hint)


@pytest.mark.parametrize("numbers", [(3, 1), (2, 2), (-1,), (0, 60), (59, 60)])
def test_frames_that_do_not_increase_or_are_out_of_range_are_the_mistake_of_the_caller(
    shard_set: ShardSet, numbers: tuple[int, ...]
) -> None:
    video = Variant.open(shard_set.data)
    (chunk, *_) = chunks_of_shard(video.directory, 0, commits=video.commits, next_chunks={})
    times = [frame.pts or 0 for frame in chunk.frames((0, 1, 59))]
    assert len(times) == 3 and times[0] < times[1] < times[2]
    message = (
        rf"{chunk.key}: frames\(\) got index {numbers[-1]}.*; indices must be in strictly ascending order, from 0 to 59"
    )
    with pytest.raises(ValueError, match=message):
        chunk.frames(numbers)


@pytest.mark.parametrize(
    ("declared", "difference"),
    [("LACKING_FIELDS", "lengths_most is missing"), ("OTHER_FIELDS", "lengths_value is double, not string")],
)
def test_declared_fields_that_the_samples_lack_are_the_mistake_of_the_package(
    shard_set: ShardSet, tmp_path: Path, declared: str, difference: str, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {"columns": {"lengths": f"{__name__}:COLUMN"}}
    for folder, declaration in (("right", "FIELDS"), ("wrong", declared)):
        declare(tmp_path / folder, "odd", {**groups, "fields": {"lengths": f"{__name__}:{declaration}"}})
    for _ in range(2):  # the package is repaired, and the table with the right fields is written again
        with installed_here(tmp_path / "right"):
            make_here(COLUMN, shard_set.data)
            assert len(stored_rows(shard_set.data, "lengths", ["lengths_value"])[0]) == 5
            assert "warning" not in capsys.readouterr().err
        with installed_here(tmp_path / "wrong"):
            with pytest.raises(UserError, match=f"odd 1.0 declares for the column lengths .*: {difference}") as error:
                stored_rows(shard_set.data, "lengths", ["lengths_value"])
            assert "declare the fields of the package's ChunkWork" in str(error.value.hint)
            make_here(COLUMN, shard_set.data)
            assert difference in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "code"), [("stop", FailureCode.BUDGET_SPENT), ("no model", FailureCode.MODEL_UNAVAILABLE)]
)
def test_a_shard_that_stops_is_not_committed(shard_set: ShardSet, how: str, code: FailureCode) -> None:
    made = make_here(COLUMN, shard_set.data, how=how)
    assert (made.num_shards, set(failures(made))) == (0, {str(code)})
    assert not list((shard_set.data / "lengths").rglob("*.tar"))


def test_samples_in_another_order_are_refused(shard_set: ShardSet) -> None:
    made = make_here(COLUMN, shard_set.data, how="reversed")
    assert made.num_shards == 0 and set(failures(made)) == {"column_error"}
    assert any("the sample long_000004000 instead of long_000000000" in failure.message for failure in made.failures)


def test_a_worker_loads_neither_plan_nor_driver() -> None:
    modules = [f"clipmill.prep.{name}" for name in ("scores.work", "scores.score", "captions.work", "captions.worker")]
    modules += ["clipmill.prep.latents.work", "clipmill.prep.latents.worker", "clipmill_example.brightness"]
    script = (
        "import sys\n"
        f"sys.path[:0] = {[str(ROOT / 'tests' / 'plugin_example'), str(ROOT)]!r}\n"
        "import clipmill.prep.core.chunk_work\n"
        f"import {', '.join(modules)}\n"
        "print(*sorted(name.removeprefix('clipmill.prep.') for name in sys.modules if 'clipmill.prep.' in name))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy = {"core.plan", "core.run", "core.chunk_columns", "core.chunk_column", "core.report", "core.parts"}
    assert not heavy & set(ran.stdout.split()), ran.stdout


def test_the_example_in_the_documentation_is_the_one_that_is_tested() -> None:
    example = (ROOT / "tests/plugin_example/clipmill_example/brightness.py").read_text().rstrip()
    assert f"```python\n{example}\n```" in (ROOT / "docs/plugins.md").read_text()


@dataclass(frozen=True, kw_only=True)
class PairsSettings:
    """Settings of a column that stores the lengths of chunks and of the chunks after them."""

    least: int = 0
    packed: Annotated[bool, STORED_IF_CHANGED] = False


def make_pairs(chunks: Chunks, recipe: Recipe[PairsSettings]) -> Iterator[Sample | SourceFailure]:
    extension = PAIRS.extension_of(recipe)

    def pair(chunk: Chunk) -> Sample:
        frames = [chunk["num_frames"], 0 if chunk.next is None else chunk.next["num_frames"]]
        return chunk.sample({extension: str(frames).encode()}, {"lengths_value": float(sum(frames))})

    return chunks.each(pair)


PAIRS = ChunkWork(
    fields=chunk_fields(pa.field("lengths_value", pa.float64())),
    extension=lambda recipe: "zip" if recipe.settings.packed else "txt",
    make=make_pairs,
    reads_next=lambda recipe: True,
    has_sample=lambda recipe, length: length.num_frames >= recipe.settings.least,
)
PAIRS_COLUMN = replace(COLUMN, name="pairs", settings=PairsSettings, work=f"{__name__}:PAIRS")


def pairs(data: Path) -> dict[str, tuple[str, bytes]]:
    """Return the extension and content of each sample, by key."""
    samples = Variant.open(data, column="pairs").iterate()
    members = {sample["__key__"]: [item for item in sample.items() if isinstance(item[1], bytes)] for sample in samples}
    return {key: member for key, (member,) in members.items()}


def test_a_sample_may_depend_on_the_next_chunk(shard_set: ShardSet) -> None:
    assert make_here(PAIRS_COLUMN, shard_set.data).num_encoded == 5
    assert {key: content.decode() for key, (_, content) in pairs(shard_set.data).items()} == {
        "long_000000000": "[60, 60]",
        "long_000002000": "[60, 30]",
        "long_000004000": "[30, 0]",
        "short_000000000": "[60, 30]",
        "short_000002000": "[30, 0]",
    }
    make_here(COLUMN, shard_set.data)
    alone, both = (
        {row["key"]: row["chunk_fingerprint"] for shard in variant.shards() for row in shard.index.to_pylist()}
        for variant in (Variant.open(shard_set.data, column=name) for name in ("lengths", "pairs"))
    )
    same = {key for key in both if both[key] == alone[key]}
    assert same == {"long_000004000", "short_000002000"}, "a fingerprint must cover the next chunk"


def test_chunks_without_a_sample_are_neither_made_nor_missing(shard_set: ShardSet) -> None:
    made = make_here(PAIRS_COLUMN, shard_set.data, least=60)
    assert (made.num_encoded, made.failures) == (3, []) and len(pairs(shard_set.data)) == 3
    again = make_here(PAIRS_COLUMN, shard_set.data, least=60)
    assert (again.num_shards_made, again.num_chunks) == (0, 3)
    none = make_here(PAIRS_COLUMN, shard_set.data, least=1000)
    assert (none.num_encoded, none.failures) == (0, []) and none.num_shards_empty == none.num_shards_made


def test_a_later_setting_keeps_the_variants_from_before_and_may_change_the_extension(shard_set: ShardSet) -> None:
    make_here(PAIRS_COLUMN, shard_set.data)
    plain, before = current_variant(shard_set.data, "pairs"), pairs(shard_set.data)
    recipe = Variant.open(shard_set.data, column="pairs").recipe
    assert "packed" not in recipe and not PAIRS_COLUMN.stored_settings(recipe).packed
    make_here(PAIRS_COLUMN, shard_set.data, packed=True)
    recipe = Variant.open(shard_set.data, column="pairs").recipe
    assert current_variant(shard_set.data, "pairs") != plain and PAIRS_COLUMN.stored_settings(recipe).packed
    assert pairs(shard_set.data) == {key: ("zip", content) for key, (_, content) in before.items()}
    assert {extension for extension, _ in before.values()} == {"txt"}
