"""A pipeline of any length equals the run of one process: losses, gradients and tokens are the same."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from clipmill.manifests.errors import Stopped, UserError
from clipmill.train.config.evaluation import EvaluationSettings
from clipmill.train.config.training import ParallelSettings, TrainingSettings
from clipmill.train.distributed.pipeline import check_microbatches
from clipmill.train.distributed.world import World
from clipmill.train.engine.task import check_stages, take_stage
from clipmill.train.run.checkpoint import all_checkpoints, latest_checkpoint, read_metadata, read_table, read_weights
from clipmill.train.run.folder import RunFolder, read_lines
from clipmill.train.tasks.caption.stages import TIED
from tests.train.distributed.conftest import ONE
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.distributed.stage_runs import (
    DECODINGS,
    SCHEDULES,
    Captions,
    StageTask,
    begin_from,
    captioner,
    captions_by,
    chosen_of,
    run_further_stages,
    run_stages,
    train_stages,
    train_tuned,
)
from tests.train.distributed.test_ranks import assert_same, losses
from tests.train.plane import PlaneTask

LIKE_ONE = ["2-1f1b", "4", "2x2-ddp", "2x2-zero1", "resumed-2x2-zero1", "four-of-2x2"]
THREE_STAGES = [f"3-{schedule}" for schedule in SCHEDULES]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs that `stage_runs` makes on one, two and four ranks; finally, one of the two ranks is killed."""
    folder = tmp_path_factory.mktemp("stages")
    model = train_stages(chosen_of(folder / "one"), ONE)
    (folder / "said.json").write_text(json.dumps(captions_by(model.eval())))
    end_well(fork_ranks(run_stages, folder, size=4, folder=folder))
    first, second = fork_ranks(run_stages, folder, size=2, folder=folder)
    checkpoints = RunFolder(folder / "endless").checkpoints
    while first.process.is_alive() and max(all_checkpoints(checkpoints), default=0) < 10:
        time.sleep(0.1)
    second.process.kill()
    second.process.join()
    killed_s = time.monotonic()
    status, errors = first.end(within_s=60)
    (folder / "killed.json").write_text(json.dumps([status, errors, time.monotonic() - killed_s]))
    yield folder


@pytest.fixture(scope="module")
def further_runs(runs: Path) -> Path:
    """Runs with further schedules and strategies, on three stages, and of models that are trained in part."""
    for size in (2, 3, 4):
        end_well(fork_ranks(run_further_stages, runs, size=size, folder=runs))
    train_stages(chosen_of(runs / "frozen"), ONE, frozen="video.")
    train_tuned(runs / "tuned", ONE)
    return runs


@pytest.mark.parametrize("name", LIKE_ONE)
def test_a_pipeline_is_one_process(runs: Path, name: str) -> None:
    assert_like_one(runs, name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["2-gpipe", "resumed-2x2-ddp", "resumed-4", *THREE_STAGES])
def test_a_pipeline_is_one_process_with_further_schedules_and_strategies(further_runs: Path, name: str) -> None:
    assert_like_one(further_runs, name)
    if name in THREE_STAGES:
        assert_gradients_of_one(further_runs, name)


def assert_like_one(runs: Path, name: str) -> None:
    assert_same(runs / name, runs / "one")
    lines, expected = (read_lines(RunFolder(runs / run_name).metrics) for run_name in (name, "one"))
    for key in ("grad_norm", "num_tokens", "lr"):
        assert [line[key] for line in lines] == pytest.approx([line[key] for line in expected], rel=1e-10), key
    assert [line["step"] for line in lines] == [1, 2, 3], "each step is logged once"
    assert any(line["grad_norm"] > 0.5 for line in lines), "no gradient was clipped, so the test proves nothing"
    after_2 = [read_weights(all_checkpoints(RunFolder(runs / run_name).checkpoints)[2]) for run_name in (name, "one")]
    assert after_2[0].keys() == after_2[1].keys()
    for key, value in after_2[0].items():
        torch.testing.assert_close(value, after_2[1][key], atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", [name for name in LIKE_ONE if not name.startswith(("resumed", "four"))])
def test_its_gradients_are_those_of_one_process(runs: Path, name: str) -> None:
    assert_gradients_of_one(runs, name)


def assert_gradients_of_one(runs: Path, name: str) -> None:
    expected = torch.load(runs / "one" / "step-1-rank-0.pt")
    pieces_by_key = {}
    for path in sorted((runs / name).glob("step-1-rank-*.pt")):
        for key, gradient in torch.load(path).items():
            torch.testing.assert_close(gradient, expected[key], atol=1e-10, rtol=0)
            assert gradient.abs().max() > 1e-6, f"no gradient reaches {key}"
            pieces_by_key[key] = gradient
    assert pieces_by_key.keys() == expected.keys()


def test_what_lies_on_two_stages_is_the_same_to_the_bit_and_is_stored_once(runs: Path) -> None:
    ends = [torch.load(runs / f"tied-{rank}.pt") for rank in range(4)]
    first, second = (state[TIED] for state in ends if state)
    assert torch.equal(first, second)
    path = latest_checkpoint(runs / "4" / "checkpoints")
    assert path is not None
    table = read_table(path)
    assert {name: len(entry["pieces"]) for name, entry in table.items() if TIED in name} == {
        f"{kind}{TIED}{key}": 1
        for kind, key in (
            ("model.", ""),
            ("ema.", ""),
            ("optimizer.model.", ".exp_avg"),
            ("optimizer.model.", ".exp_avg_sq"),
            ("optimizer.model.", ".step"),
        )
    }


@pytest.mark.parametrize("name", ["4", "2x2-zero1"])
def test_one_process_goes_on_with_what_a_pipeline_began(runs: Path, tmp_path: Path, name: str) -> None:
    out = begin_from(tmp_path / name, runs / name, ONE)
    train_stages(chosen_of(out), ONE)
    assert_same(out, runs / "one")


@pytest.mark.nightly
def test_a_tower_that_is_frozen_needs_no_gradients_on_its_stage(further_runs: Path) -> None:
    assert_same(further_runs / "3-frozen", further_runs / "frozen")
    assert losses(further_runs / "frozen") != losses(further_runs / "one")


@pytest.mark.nightly
def test_frozen_blocks_adapters_and_layer_wise_rates_are_those_of_one_process(further_runs: Path) -> None:
    assert_same(further_runs / "3-tuned", further_runs / "tuned")
    assert losses(further_runs / "tuned") != losses(further_runs / "frozen")


def test_dropout_is_drawn_by_step_and_stage_and_not_by_what_went_before(runs: Path) -> None:
    assert_same(runs / "dropout-resumed", runs / "dropout", atol=0)
    assert losses(runs / "dropout") != losses(runs / "one")


def test_all_stages_say_what_one_process_says(runs: Path) -> None:
    expected = json.loads((runs / "said.json").read_text())
    for rank in range(4):
        captions_said = json.loads((runs / f"said-{rank}.json").read_text())
        for name in DECODINGS:
            assert captions_said[name] == expected[name], name
        torch.testing.assert_close(
            torch.tensor(captions_said["logits"]), torch.tensor(expected["logits"]), atol=1e-8, rtol=0
        )
    assert len({str(expected[name]) for name in DECODINGS}) == len(DECODINGS)


def test_samples_that_fail_are_counted_once_and_stop_all_stages(runs: Path, tmp_path: Path) -> None:
    shown = [json.loads((runs / f"shown-{rank}.json").read_text()) for rank in (0, 1)]
    assert shown[0] == shown[1]
    assert "2 samples failed, more than --max-failures 1" in shown[0]["budget"]
    assert "the loss is nan at step" in shown[0]["poisoned"]
    content = json.loads((runs / "poisoned" / "bad_batch.json").read_text())
    assert len(content["ranks"]) == 1 and "point_7" in content["ranks"][0]["keys"]
    train_stages(chosen_of(tmp_path / "failing", max_failures=50), ONE, Captions(failing=(3, 11)))
    assert_same(runs / "2-failing", tmp_path / "failing")
    failed = [read_lines(RunFolder(folder).failures) for folder in (runs / "2-failing", tmp_path / "failing")]
    assert failed[0] == failed[1] and failed[0]
    assert len(read_metadata(all_checkpoints(RunFolder(runs / "2-failing").checkpoints)[2]).loader) == 1


def test_a_stage_that_is_killed_ends_the_others_and_the_run_goes_on(runs: Path, tmp_path: Path) -> None:
    status, errors, after_s = json.loads((runs / "killed.json").read_text())
    assert status == 1 and after_s < 60
    assert "has lost another rank" in errors and "--resume" in errors
    out = tmp_path / "endless"
    shutil.copytree(runs / "endless", out)
    reached = max(all_checkpoints(RunFolder(out).checkpoints))
    assert reached >= 10
    endless = chosen_of(out, steps=10**6, checkpoint_every=5, evaluate=EvaluationSettings(every=5))
    with pytest.raises(Stopped):
        train_stages(endless, ONE)
    steps = [line["step"] for line in read_lines(RunFolder(out).metrics)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) == reached + 4


def test_cuts_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match=r"--parallel.stages is 2, but 3 processes cannot be divided"):
        World(size=3).cut(2)
    with pytest.raises(UserError, match=r"--parallel.stages is 2, but 1 process cannot be divided") as caught:
        World().cut(2)
    assert caught.value.hint is not None and "torchrun --nproc-per-node 2" in caught.value.hint
    with pytest.raises(UserError, match=r"--parallel.stages is 10, but the model has only 9 layers"):
        take_stage(StageTask(Path(), 0), captioner(), ParallelSettings(stages=10), stages=World(size=10))
    with pytest.raises(UserError, match="models trained by `train plane` cannot be cut into stages"):
        check_stages(PlaneTask(), None, TrainingSettings(parallel=ParallelSettings(stages=2)), world=World(size=2))
    with pytest.raises(UserError, match=r"--parallel.strategy fsdp and --parallel.stages 2 cannot be combined"):
        ParallelSettings(stages=2, strategy="fsdp")
    with pytest.raises(UserError, match=r"--parallel.partition 'size' is not"):
        ParallelSettings(partition="size")
    with pytest.raises(UserError, match=r"--parallel.stages is 0"):
        ParallelSettings(stages=0)


def test_microbatches_that_do_not_divide_a_share_are_refused() -> None:
    three = ParallelSettings(stages=3)
    check_microbatches(12, size=4, settings=three)
    with pytest.raises(UserError, match="--microbatch 5 does not divide the 12 samples per batch of a pipeline"):
        check_microbatches(12, size=5, settings=three)
    with pytest.raises(UserError, match="--microbatch 6 divides its 12 samples per batch into only 2") as caught:
        check_microbatches(12, size=6, settings=three)
    assert caught.value.hint is not None and "use --microbatch 4" in caught.value.hint
    check_microbatches(12, size=12, settings=ParallelSettings(stages=3, schedule="gpipe"))


def test_stages_have_the_weights_that_one_process_begins_with() -> None:
    torch.manual_seed(0)
    whole = dict(captioner().named_parameters())
    parts: dict[str, nn.Parameter] = {}
    for rank in range(3):
        torch.manual_seed(0)
        part = take_stage(
            StageTask(Path(), 0), captioner(), ParallelSettings(stages=3), stages=World(rank=rank, size=3)
        )
        parts |= dict(part.named_parameters())
        assert sum(parameter.numel() for parameter in part.parameters()) < sum(
            tensor.numel() for tensor in whole.values()
        )
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
