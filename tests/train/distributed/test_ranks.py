"""Two ranks and one process make the same run: equal losses, equal weights, and interchangeable checkpoints."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from clipmill.train.run.checkpoint import all_checkpoints, latest_checkpoint, read_metadata, read_table
from clipmill.train.run.folder import RunFolder, read_lines
from tests.train.distributed.conftest import ONE, Runs
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.distributed.runs import (
    FAILING,
    FURTHER_PARTS,
    PARTS,
    STRATEGIES,
    adapter_settings,
    exact_plane,
    run_further_parts,
    towers,
    train_plane,
    train_towers,
)
from tests.train.plane import Points
from tests.train.running import losses, weights_of


def assert_same(actual: Path, expected: Path, *, atol: float = 1e-10) -> None:
    assert losses(actual) == pytest.approx(losses(expected), abs=atol)
    expected_weights = weights_of(expected)
    found_weights = weights_of(actual)
    assert found_weights.keys() == expected_weights.keys()
    for name, value in found_weights.items():
        torch.testing.assert_close(value, expected_weights[name], atol=atol, rtol=0)


WHOLE = [f"{name}-{strategy}" for name in ("plane", "towers") for strategy in STRATEGIES]


@pytest.mark.parametrize("name", [*WHOLE, *PARTS])
def test_the_same_seed_gives_the_same_curve_on_one_process_and_on_two(runs: Runs, name: str) -> None:
    kind = name.partition("-")[0]
    assert_same(runs.two / name, runs.one / kind)
    assert len(set(losses(runs.one / kind))) > 3


@pytest.mark.nightly
def test_every_part_of_a_model_gives_the_same_curve_with_every_strategy(runs: Runs, tmp_path: Path) -> None:
    end_well(fork_ranks(run_further_parts, tmp_path, runs.data_dir, runs.one / "towers", size=2, folder=tmp_path))
    for name in FURTHER_PARTS:
        assert_same(tmp_path / name, runs.one / name.partition("-")[0])


def test_zero_is_ddp_to_the_bit(runs: Runs) -> None:
    for name in ("plane", "towers"):
        assert_same(runs.two / f"{name}-zero1", runs.two / f"{name}-ddp", atol=0)


def test_microbatches_exchange_their_gradients_once_and_give_those_of_the_batch(runs: Runs) -> None:
    assert_same(runs.two / "microbatches", runs.one / "plane")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_go_on_with_what_one_process_began(runs: Runs, strategy: str) -> None:
    assert_same(runs.two / f"resumed-{strategy}", runs.one / "plane")


@pytest.mark.parametrize(
    "name", [f"plane-{strategy}" for strategy in STRATEGIES] + ["towers-fsdp", "towers-zero1", "adapted-zero1"]
)
def test_one_process_goes_on_with_what_two_ranks_began(runs: Runs, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    shutil.copytree(runs.two / name, out)
    for path in sorted((out / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    before = len(losses(out))
    kind = name.partition("-")[0]
    if kind == "plane":
        train_plane(exact_plane(out), ONE)
    elif kind == "adapted":
        train_towers(adapter_settings(out, runs.data_dir, source=runs.one / "towers"), ONE)
    else:
        train_towers(towers(out, runs.data_dir), ONE)
    assert len(losses(out)) == before
    assert_same(out, runs.one / kind)


def test_state_is_stored_in_parts_where_ranks_have_parts(runs: Runs) -> None:
    def pieces(name: str, prefix: str) -> list[list[str]]:
        path = latest_checkpoint(runs.two / f"towers-{name}" / "checkpoints")
        assert path is not None
        table = read_table(path)
        return [
            [piece["file"][:3] for piece in entry["pieces"]] for key, entry in table.items() if key.startswith(prefix)
        ]

    assert ["__0", "__1"] in pieces("fsdp", "model.") and ["__0", "__1"] in pieces("fsdp", "optimizer.model.")
    assert {tuple(entry) for entry in pieces("zero1", "optimizer.model.")} == {("__0",), ("__1",)}
    assert {len(entry) for entry in pieces("ddp", "objective.")} == {1, 2}, (
        "the per-sample state of the loss is stored in parts"
    )
    assert {len(entry) for entry in [*pieces("ddp", "model."), *pieces("ddp", "optimizer.")]} == {1}
    facts = read_metadata(runs.two / "plane-fsdp" / "checkpoints" / "step_000012")
    assert len(facts.loader) == 2


def test_only_what_is_trained_has_optimizer_state_and_an_average(runs: Runs) -> None:
    for out in (runs.one / "adapted", runs.two / "adapted-zero1"):
        path = latest_checkpoint(out / "checkpoints")
        assert path is not None
        names = [name for name in read_table(path) if not name.startswith(("objective.", "optimizer.objective."))]
        stored, averaged, optimized = (
            {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
            for prefix in ("model.", "ema.", "optimizer.model.")
        )
        assert stored == averaged == {name.rpartition(".")[0] for name in optimized}
        # The first of the 2 blocks is frozen. The other has 4 matrices.
        assert len(stored) == 4 * 2 and all(name.endswith((".lora.A", ".lora.B")) for name in stored)
        assert not any("resblocks.0." in name for name in stored)


def test_evaluations_are_in_the_metrics_and_the_best_checkpoint_stays(runs: Runs) -> None:
    for out in (runs.one / "plane", runs.two / "plane-fsdp"):
        lines = [line for line in read_lines(RunFolder(out).metrics) if "closeness" in line]
        assert [line["step"] for line in lines] == [3, 6, 9, 12]
        best = max(lines, key=lambda line: line["closeness"])["step"]
        stored = all_checkpoints(RunFolder(out).checkpoints)
        assert best in stored and read_metadata(stored[best]).numbers["closeness"] == max(
            line["closeness"] for line in lines
        )
    kept = list(all_checkpoints(runs.two / "plane-fsdp" / "checkpoints"))
    assert len(kept) <= 4 and kept[-1] == 12
    mine, theirs = (
        [line["error"] for line in read_lines(RunFolder(out).metrics) if "error" in line]
        for out in (runs.one / "plane", runs.two / "plane-fsdp")
    )
    assert mine == pytest.approx(theirs, abs=1e-10)


def test_a_model_in_parts_is_probed_as_a_whole_one(runs: Runs) -> None:
    lines = {
        name: read_lines(RunFolder(folder).metrics)
        for name, folder in (("one", runs.one / "masked"), ("two", runs.two / "masked-fsdp"))
    }
    for step in (1, 3):
        numbers = {name: value for name, value in lines["one"][step].items() if name.startswith("val/pattern_")}
        assert len(numbers) == 6 and numbers["val/pattern_linear_top1"] > 1 / 8
        assert {name: lines["two"][step][name] for name in numbers} == pytest.approx(numbers, abs=1e-9)


def test_failures_of_all_ranks_are_listed_and_budgeted_together(runs: Runs) -> None:
    out = runs.two / "failing"
    lines = read_lines(RunFolder(out).failures)
    assert {line["key"] for line in lines} == {f"point_{number}" for number in FAILING}
    assert read_lines(RunFolder(out).metrics)[-1]["num_failed"] == len(lines)
    shown = [json.loads((runs.two / f"shown-{rank}.json").read_text()) for rank in (0, 1)]
    assert shown[0] == shown[1]
    assert shown[0]["budget"].startswith("3 samples failed, more than --max-failures 2")


def test_ranks_that_failures_set_apart_are_resumed_by_one_process(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "failing"
    shutil.copytree(runs.two / "failing", out)
    first, *later = sorted((out / "checkpoints").iterdir())
    for path in later:
        shutil.rmtree(path)
    assert any(loader_state["ahead"] for loader_state in read_metadata(first).loader), (
        "no rank was ahead, so the test proves nothing"
    )
    train_plane(exact_plane(out, max_failures=50), ONE, Points(failing=FAILING))
    assert [line["step"] for line in read_lines(RunFolder(out).metrics)] == list(range(1, 13))
    failed = [line["position"] for line in read_lines(RunFolder(out).failures)]
    assert len(set(failed)) == len(failed), "no position is visited twice"


def test_weights_of_one_rank_that_are_not_finite_stop_all_and_no_checkpoint_is_made(runs: Runs) -> None:
    shown = [json.loads((runs.two / f"shown-{rank}.json").read_text())["not-finite"] for rank in (0, 1)]
    assert shown[0] == shown[1] and "after step 12 " in shown[0] and "ema.0.weight" in shown[0]
    assert max(all_checkpoints(runs.two / "not-finite" / "checkpoints")) < 12


def test_a_loss_that_is_no_number_stops_all_ranks_with_the_keys_of_all(runs: Runs) -> None:
    shown = [json.loads((runs.two / f"shown-{rank}.json").read_text())["poisoned"] for rank in (0, 1)]
    assert shown[0] == shown[1] and "the loss is nan at step" in shown[0]
    content = json.loads((runs.two / "poisoned" / "bad_batch.json").read_text())
    assert len(content["ranks"]) == 2 and all(len(entry["keys"]) == 3 for entry in content["ranks"])
    assert "point_7" in [key for entry in content["ranks"] for key in entry["keys"]]
