"""`train bench` from the command line: measurements, output and exit status."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from clipmill.manifests.store import read_captions, read_videos
from clipmill.manifests.write import write_manifest
from clipmill.train.registry import tasks
from tests.tiers import nightly_beyond
from tests.train.latents.columns import write_columns
from tests.train.running import train

Bench = Callable[..., int]
SMALL = {"--model": "tiny", "--num-frames": 2, "--size-px": 32, "--batch": 4, "--workers": 2, "--device": "cpu"}
LINKS = ["read", "decode", "crop", "tokens", "transfer", "augment", "model"]


@pytest.fixture
def bench() -> Bench:
    """Run the command in this process and return its exit status."""

    def run(*arguments: object) -> int:
        defaults = {**SMALL, "--seconds": 0.05}
        given = [word for flag, value in defaults.items() if flag not in arguments for word in (flag, value)]
        return train("bench", *arguments, *given)

    return run


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(["--decode", "plain", "--samples-per-chunk", "3"], marks=pytest.mark.nightly),
        ["--decode", "filter", "--augment.contrast", "0.5"],
    ],
)
def test_every_link_has_a_rate_and_the_slowest_is_named(
    bench: Bench, data_dir: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert bench("--shards", data_dir, "--json", *more) == 0
    result = json.loads(capsys.readouterr().out)
    rates = {link["link"]: link["items_per_s"] for link in result["links"]}
    assert list(rates) == LINKS
    assert rates.pop("transfer") is None, "a CPU run has no transfers"
    assert min(rates.values()) > 0
    assert rates[result["slowest"]] == min(rates.values())
    for name in (
        *("loader_items_per_s", "compute_items_per_s", "step_items_per_s", "read_bytes_per_item", "memory_bytes"),
    ):
        assert result[name] > 0, name
    assert (result["bound"] == "data") == (result["loader_items_per_s"] < result["compute_items_per_s"])
    assert 0 <= result["wait_share"] <= 1 and 0 <= result["expected_wait_share"] <= 1
    assert result["advice"] and result["num_failed"] == 0
    assert result["settings"]["batch"] == 4 and result["settings"]["shards"] == str(data_dir)
    assert result["disk"]["path"] == str(data_dir)


@pytest.fixture(scope="module")
def labelled_data(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data folder with a class for each caption."""
    folder = tmp_path_factory.mktemp("labelled")
    shutil.copytree(data_dir, folder, dirs_exist_ok=True)
    captions = read_captions(data_dir).drop(["caption_id"])
    kinds = [text.split()[1] for text in captions["text"].to_pylist()]
    videos = read_videos(data_dir).select(["video_id", "source_id", "path", "split"])
    write_manifest(folder, "test", videos, captions.append_column("label_class", pa.array(kinds)))
    return folder


@pytest.mark.parametrize("task", nightly_beyond(["dual-encoder"], [spec.name for spec in tasks()]))
def test_every_task_is_measured(
    bench: Bench, labelled_data: Path, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    assert bench(task, "--shards", labelled_data, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [link["link"] for link in result["links"]] == LINKS
    assert result["step_s"] == pytest.approx(4 / result["step_items_per_s"]) and 0 <= result["wait_share"] <= 1


def test_latents_have_a_loader_without_stages(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_dir = write_columns(tmp_path)
    words = ["--shards", data_dir, "--input", "latents", "--text-tower", "frozen", "--segment", "2s", "--json"]
    assert bench(*words) == 0
    result = json.loads(capsys.readouterr().out)
    assert [link["link"] for link in result["links"]] == ["transfer", "augment", "model"]
    assert result["loader_items_per_s"] > 0 and result["read_bytes_per_item"] is None
    assert result["cause"] == ("loader" if result["bound"] == "data" else "model")


def test_packets_read_less_than_whole_chunks(bench: Bench, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read = []
    for decode in ("packets", "plain"):
        assert bench("--shards", data_dir, "--json", "--decode", decode) == 0
        read.append(json.loads(capsys.readouterr().out)["read_bytes_per_item"])
    assert read[0] < read[1]


def test_the_table_says_what_to_change(bench: Bench, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--shards", data_dir) == 0
    printed = capsys.readouterr().out
    for words in (*LINKS, "items/s", "not needed", "slowest stage: ", "-bound: ", "what to change ("):
        assert words in printed


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--shards", "nowhere"], "there is no data folder nowhere", "--shards"),
        (["--shards", "{data}", "--seconds", "0"], "--seconds is 0.0", "above 0"),
        (["--shards", "{data}", "--batch", "10"], "--batch 10 is larger than the 9 training samples", "use --batch 8"),
    ],
)
def test_mistakes_are_two_lines(
    bench: Bench, data_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str, hint: str
) -> None:
    assert bench(*[argument.format(data=data_dir) for argument in arguments]) == 2
    printed_error, printed_hint = capsys.readouterr().err.splitlines()
    assert error in printed_error and hint in printed_hint


def test_data_that_cannot_be_decoded_is_no_rate(
    bench: Bench, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "data"
    shutil.copytree(data_dir, broken)
    for tar in broken.glob("video/*/*.tar"):
        content = tar.read_bytes()
        tar.write_bytes(bytes(byte ^ 1 for byte in content))
    # If all samples fail, the benchmark stops, whatever the number of allowed failures.
    for max_failures in (5, 1_000_000):
        assert bench("--shards", broken, "--max-failures", max_failures) == 1
        assert "too many samples could not be loaded" in capsys.readouterr().err
