"""Ranks on nodes that share only a bucket: one rank is lost, and the resumed run has the same bits."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from clipmill.manifests.storage.objects import open_objects
from clipmill.train.config.shards import local_folder
from clipmill.train.distributed.launch import open_world
from clipmill.train.run.checkpoint import all_checkpoints, content_of, fill, read_table, read_weights
from clipmill.train.run.folder import RunFolder, create_run, read_lines
from tests.object_storage.faults import Fault, Faults
from tests.train.distributed.forked import Rank, end_well, fork_ranks, free_port
from tests.train.distributed.runs import run_on_nodes
from tests.train.latents.columns import FLAGS, write_columns
from tests.train.plane import settings, train_plane


def test_nodes_without_a_shared_disk_lose_one_and_end_with_the_same_bits(
    tmp_path: Path, bucket: str, faults: Faults, other_machine: Callable[[], Path]
) -> None:
    data = write_columns(tmp_path / "columns")
    command = ["dual-encoder", *FLAGS, "--batch", "8", "--steps", "6", "--warmup-steps", "1", "--device", "cpu"]
    command += ["--shards", str(data), "--checkpoint-every", "2", "--workers", "1", "--resume", "auto"]
    command += ["--parallel.strategy", "zero1", "--keep-checkpoints", "2"]
    in_bucket = [*command, "--out", f"{bucket}/run"]

    def launch(name: str, *commands: list[str]) -> list[Rank]:
        nodes = [_node(tmp_path / f"{name}-{rank}") for rank in range(2)]
        ports = [free_port() for _ in commands]
        (tmp_path / name).mkdir()
        return fork_ranks(run_on_nodes, nodes, ports, list(commands), size=2, folder=tmp_path / name)

    # The second rank is lost while it uploads its part of the second checkpoint.
    faults.set(Fault("hang", method="PUT", path="step_000004/__1_"))
    first, second = launch("lost", in_bucket)
    while not faults.seen().num_faults:
        second.process.join(0.05)
        assert second.process.exitcode is None, second.stderr_path.read_text()
    second.process.kill()
    _, stderr = first.end()
    assert "rank 0 of 2" in stderr or "has lost" in stderr, stderr
    assert "/checkpoints/step_000004/__0_" in str(faults.seen().requests)
    faults.set()
    end_well(launch("again", in_bucket, [*command, "--out", str(tmp_path / "local")]))

    other_machine()
    run, whole = RunFolder(local_folder(f"{bucket}/run")), RunFolder(tmp_path / "local")
    weights, expected = (read_weights(all_checkpoints(run_folder.checkpoints)[6]) for run_folder in (run, whole))
    assert weights.keys() == expected.keys() and all(
        torch.equal(value, expected[name]) for name, value in weights.items()
    )
    for name in ("step", "loss", "epoch"):
        assert [line[name] for line in read_lines(run.metrics)] == [line[name] for line in read_lines(whole.metrics)]
    kept = all_checkpoints(run.checkpoints)
    assert list(kept) == [4, 6]
    files = {path.name: [*content_of(path)["files"], "checkpoint.json"] for path in kept.values()}
    named = {f"checkpoints/{step}/{name}" for step, names in files.items() for name in names}
    keys = {info.key for info in open_objects(f"{bucket}/run").list()}
    assert {key for key in keys if key.startswith("checkpoints/")} == named, "a part of the lost launch was not deleted"


def test_ranks_of_a_node_fetch_a_part_once(
    tmp_path: Path, bucket: str, faults: Faults, other_machine: Callable[[], Path]
) -> None:
    other_machine()
    address = f"{bucket}/run"
    run = RunFolder(local_folder(address))
    chosen = replace(settings(run.path, steps=1, batch=4, checkpoint_every=1), workers=1)
    create_run(chosen)
    with run.hold():
        train_plane(chosen)
    expected = read_weights(all_checkpoints(run.checkpoints)[1])
    faults.set()
    end_well(fork_ranks(_read, _node(tmp_path / "node"), address, expected, size=2, folder=tmp_path))
    methods = [method for method, path in faults.seen().requests if path.endswith(".bin")]
    assert methods == ["GET"], faults.seen().requests
    (parts,) = (tmp_path / "node").glob("parts-*")
    assert list((parts / "objects").iterdir()) == [], "copies were not deleted"


def _read(environment: dict[str, str], address: str, expected: dict[str, torch.Tensor]) -> None:
    """Compare the checkpoint that a rank reads with the expected tensors."""
    os.environ |= environment
    path = all_checkpoints(RunFolder(local_folder(address)).checkpoints)[1]
    tensors = {f"model.{name}": torch.empty_like(tensor) for name, tensor in expected.items()}
    with open_world(device_type="cpu") as world:
        fill(path, read_table(path), tensors, world=world)
    assert all(torch.equal(tensors[f"model.{name}"], tensor) for name, tensor in expected.items())


def _node(scratch: Path) -> dict[str, str]:
    """Return the environment of a node with its own scratch space."""
    scratch.mkdir()
    return {**{name: value for name, value in os.environ.items() if name.startswith("AWS_")}, "TMPDIR": str(scratch)}
