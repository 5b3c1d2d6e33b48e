"""Checkpoints: no code in them is executed, damage is reported, and tensors that do not fit are listed."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.train.distributed.world import World
from clipmill.train.run.checkpoint import (
    CheckpointMetadata,
    all_checkpoints,
    check_fits,
    file_facts,
    is_tiled,
    read_metadata,
    read_table,
    read_weights,
)
from clipmill.train.run.checkpoint_writer import CheckpointWriter, superfluous_steps

TENSORS = {
    "model.a.weight": torch.arange(6.0).reshape(2, 3),
    "model.b": torch.tensor([1, 2]),
    "ema.a.weight": torch.ones(2, 3),
    "optimizer.model.a.weight.step": torch.tensor(5.0),
}


def write(
    folder: Path, *steps: int, keep: int = 9, best: str | None = None, values: dict[int, float] | None = None
) -> None:
    writer = CheckpointWriter(folder, world=World(), keep=keep, best=best)
    for step in steps:
        numbers = {"score": values[step]} if values else {}
        writer.save(TENSORS, CheckpointMetadata(task="t", step=step, loader=[], numbers=numbers))
    writer.wait()
    writer.close()


def reseal(path: Path, **changed: Any) -> None:
    """Update the checksums of a checkpoint after a change of its files."""
    content = json.loads((path / "checkpoint.json").read_bytes())
    files = {name: file_facts(path / name) for name in content["files"]}
    facts = CheckpointMetadata(
        **{name: changed.get(name, content[name]) for name in CheckpointMetadata.__dataclass_fields__}
    )
    (path / "checkpoint.json").write_text(json.dumps(facts.as_json(files)))


def test_weights_are_the_averages_where_there_are_some_and_keep_their_types(tmp_path: Path) -> None:
    write(tmp_path, 3)
    weights = read_weights(tmp_path / "step_000003")
    assert set(weights) == {"a.weight", "b"} and weights["b"].dtype == torch.int64
    assert torch.equal(weights["a.weight"], torch.ones(2, 3)) and weights["b"].tolist() == [1, 2]


def test_what_is_trained_on_meanwhile_does_not_reach_the_checkpoint(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, world=World(), keep=1, best=None)
    weight = torch.zeros(1000)
    for step in (1, 2):
        weight.fill_(step)
        writer.save({"model.w": weight}, CheckpointMetadata(task="t", step=step, loader=[]))
        weight.fill_(-1)
    writer.close()
    assert list(all_checkpoints(tmp_path)) == [2], "close must wait for the checkpoint in progress"
    assert read_weights(tmp_path / "step_000002")["w"].unique().tolist() == [2]


class Hostile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def test_a_checkpoint_executes_nothing_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, 3)
    path, trace = tmp_path / "step_000003", tmp_path / "executed"
    for file in path.glob("*.bin"):
        torch.save(Hostile(trace), file)
    table = json.loads((path / "tensors.json").read_bytes())
    for entry in table.values():
        for piece in entry["pieces"]:
            piece["begin"] = 0
    (path / "tensors.json").write_text(json.dumps(table))
    reseal(path)
    assert read_weights(path)["b"].shape == (2,)
    assert not trace.exists()


def test_every_type_and_shape_is_read_as_it_was_written(tmp_path: Path) -> None:
    numbers = torch.arange(24.0).reshape(2, 3, 4)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
    tensors = {f"model.{dtype}": numbers.to(dtype) for dtype in dtypes}
    tensors |= {
        "model.scalar": torch.tensor(-0.0),
        "model.empty": torch.empty(0, 3),
        "model.transposed": numbers.permute(2, 0, 1),
    }
    tensors |= {"model.part": numbers[:, 1], "model.nan": torch.tensor([float("nan"), -float("inf")])}
    writer = CheckpointWriter(tmp_path, world=World(), keep=1, best=None)
    writer.save(tensors, CheckpointMetadata(task="t", step=1, loader=[]))
    writer.close()
    read = read_weights(tmp_path / "step_000001")
    assert len(read) == len(tensors)
    for name, tensor in tensors.items():
        same = read[name.removeprefix("model.")]
        assert same.dtype == tensor.dtype and same.shape == tensor.shape
        assert torch.equal(same.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_the_bytes_of_a_checkpoint_do_not_depend_on_the_order_of_its_tensors(tmp_path: Path) -> None:
    contents = []
    for name, tensors in (("first", TENSORS), ("second", dict(reversed(TENSORS.items())))):
        writer = CheckpointWriter(tmp_path / name, world=World(), keep=1, best=None)
        writer.save(tensors, CheckpointMetadata(task="t", step=1, loader=[]))
        writer.close()
        folder = tmp_path / name / "step_000001"
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1] and len(contents[0]) == 3


@pytest.mark.parametrize("begin", [-4, 10**6, 60, 2**70, "0", None])
def test_a_place_outside_of_the_file_is_refused(tmp_path: Path, begin: Any) -> None:
    write(tmp_path, 3)
    path = tmp_path / "step_000003"
    table = json.loads((path / "tensors.json").read_bytes())
    table["model.a.weight"]["pieces"][0]["begin"] = begin
    del table["ema.a.weight"]
    (path / "tensors.json").write_text(json.dumps(table))
    reseal(path)
    with pytest.raises(UserError, match="step_000003 cannot be read"):
        read_weights(path)


def test_a_table_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 3)
    path = tmp_path / "step_000003"
    table = json.loads((path / "tensors.json").read_bytes())
    table["model.b"]["pieces"][0]["file"] = "../elsewhere"
    (path / "tensors.json").write_text(json.dumps(table))
    reseal(path)
    with pytest.raises(UserError, match=r"'\.\./elsewhere' is not a file name") as caught:
        read_weights(path)
    assert "training then restarts at step 0, because there is no earlier checkpoint" in str(caught.value.hint)
    write(tmp_path, 2)
    with pytest.raises(UserError) as caught:
        read_weights(path)
    assert caught.value.hint == "remove this checkpoint; step_000002 is then used instead"


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [([0, 0], [1, 3])],
        [([0, 0], [1, 3]), ([0, 0], [1, 3])],
        [([0, 0], [2, 2]), ([0, 1], [2, 2])],
        [([0, 0], [2, 3]), ([0, 0], [2, 3])],
        [([0, 0], [3, 3])],
        [([-1, 0], [3, 3])],
        [([0], [6])],
        [([0, 0], [2, -3])],
        [([0, 0], [2.0, 3])],
    ],
)
def test_a_table_whose_pieces_do_not_make_up_a_tensor_is_refused(
    tmp_path: Path, pieces: list[tuple[list[float], list[float]]]
) -> None:
    """No other check detects this, and the missing elements would be uninitialized memory."""
    write(tmp_path, 3)
    path = tmp_path / "step_000003"
    table = json.loads((path / "tensors.json").read_bytes())
    (stored,) = table["ema.a.weight"]["pieces"]
    table["ema.a.weight"]["pieces"] = [{**stored, "offsets": begin, "sizes": sizes} for begin, sizes in pieces]
    (path / "tensors.json").write_text(json.dumps(table))
    reseal(path)
    with pytest.raises(UserError, match="step_000003 cannot be read"):
        read_weights(path)
    with pytest.raises(UserError, match="step_000003 cannot be read"):
        read_table(path)


def test_boxes_that_cover_each_element_once_are_whole_whatever_their_order() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = [([0, 0, 0], [4, 5, 6])]
    for _ in range(40):
        at = int(torch.randint(len(whole), (1,), generator=generator))
        dimension = int(torch.randint(3, (1,), generator=generator))
        offsets, sizes = whole.pop(at)
        cut = int(torch.randint(sizes[dimension] + 1, (1,), generator=generator))
        for begin, size in ((0, cut), (cut, sizes[dimension] - cut)):
            moved = [place_begin + begin * (place == dimension) for place, place_begin in enumerate(offsets)]
            whole.insert(0, (moved, [size if place == dimension else length for place, length in enumerate(sizes)]))
        assert is_tiled([4, 5, 6], whole)
    solid = next(box for box in whole if 0 not in box[1])
    assert not is_tiled([4, 5, 6], [*whole, solid])
    assert not is_tiled([4, 5, 6], [box for box in whole if box is not solid])
    assert is_tiled([], [([], [])]) and not is_tiled([], []) and is_tiled([0, 3], [])


@pytest.mark.parametrize("file", ["checkpoint.json", "tensors.json"])
def test_values_that_are_nested_too_deeply_are_named(tmp_path: Path, file: str) -> None:
    write(tmp_path, 3)
    path = tmp_path / "step_000003"
    (path / file).write_text("[" * 200_000)
    with pytest.raises(UserError, match="step_000003 cannot be read: nested too deeply"):
        read_metadata(path) if file == "checkpoint.json" else read_table(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("num_values", [1_000, 8_000, 100_000])
def test_a_full_disk_is_said_to_be_full(small_disk: Path, capfd: pytest.CaptureFixture[str], num_values: int) -> None:
    """The disk fills at the first byte of a tensor, at its last byte, or in the other files."""
    room = small_disk / "room"
    room.write_bytes(bytes(36_000 if num_values == 8_000 else 60_000 if num_values == 1_000 else 0))
    writer = CheckpointWriter(small_disk / "there", world=World(), keep=1, best=None)
    tensors = {name: torch.zeros(num_values) for name in ("model.a", "model.b")}
    writer.save(tensors, CheckpointMetadata(task="t", step=1, loader=[]))
    with pytest.raises(
        FailedWork, match=rf"could not write .* into {small_disk}.*: the disk is full.*continue with --resume"
    ):
        writer.wait()
    writer.close()
    assert capfd.readouterr().err == "", "torch's threads print errors"
    assert list(all_checkpoints(small_disk / "there")) == []
    # The run continues once there is space.
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    write(small_disk / "there", 1)
    assert [path.name for path in (small_disk / "there").iterdir()] == ["step_000001"]


def test_a_step_that_was_changed_does_not_pass(tmp_path: Path) -> None:
    write(tmp_path, 3)
    path = tmp_path / "step_000003" / "checkpoint.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 7'))
    with pytest.raises(UserError, match=r"the checksum of checkpoint\.json does not match"):
        read_metadata(path.parent)


def test_tensors_of_another_model_are_listed(tmp_path: Path) -> None:
    write(tmp_path, 3)
    path = tmp_path / "step_000003"
    expected = {"model.a.weight": torch.zeros(3, 3), "model.c": torch.zeros(4)}
    with pytest.raises(UserError) as caught:
        check_fits(path, read_table(path), expected, prefix="model.")
    assert str(caught.value).partition("; ")[2] == (
        "missing: model.c [4]; unexpected: model.b [2]; of a different shape: model.a.weight [2, 3] instead of [3, 3]"
    )


def test_the_last_and_the_best_stay() -> None:
    steps = [1, 2, 3, 4, 5]
    assert superfluous_steps(steps, keep=2, scores={}) == [1, 2, 3]
    assert superfluous_steps(steps, keep=2, scores={1: 0.5, 2: 0.7, 3: 0.7}) == [1, 3]
    assert superfluous_steps(steps, keep=9, scores={1: 0.5}) == []


@pytest.mark.parametrize(("metric", "best"), [("score", 2), ("mean_rank", 3)])
def test_the_best_checkpoint_of_a_metric_is_kept(tmp_path: Path, metric: str, best: int) -> None:
    values = {1: 0.2, 2: 0.9, 3: 0.1, 4: 0.5, 5: 0.4}
    writer = CheckpointWriter(tmp_path, world=World(), keep=1, best=metric, lower_is_better=metric == "mean_rank")
    pieces = []
    for step, value in values.items():
        if writer.is_best({metric: value}):
            pieces.append(step)
        writer.save(TENSORS, CheckpointMetadata(task="t", step=step, loader=[], numbers={metric: value}))
    writer.close()
    assert list(all_checkpoints(tmp_path)) == [best, 5]
    assert pieces == ([1, 2] if metric == "score" else [1, 3])


def test_a_folder_that_cannot_be_written_fails_the_run_at_the_next_checkpoint(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "there", world=World(), keep=1, best=None)
    (tmp_path / "there" / ".tmp-step_000001").write_text("in the way")
    writer.save(TENSORS, CheckpointMetadata(task="t", step=1, loader=[]))
    with pytest.raises(FailedWork, match="rank 0 could not write a checkpoint into"):
        writer.wait()
    writer.close()


def test_what_a_killed_run_left_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step_000004").mkdir()
    (tmp_path / ".tmp-step_000004" / "__0_0.bin").touch()
    write(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]
