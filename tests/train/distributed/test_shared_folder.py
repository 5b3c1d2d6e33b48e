"""A run folder that the ranks do not share is rejected, and ranks wait for files of other ranks."""

import json
from pathlib import Path

from tests.train.distributed.forked import end_well, fork_ranks, free_port
from tests.train.distributed.runs import run_apart
from tests.train.latents.columns import FLAGS, write_columns


def test_ranks_find_out_whether_they_share_a_folder(tmp_path: Path) -> None:
    """Each rank has its own working directory, as on two nodes, so the same --out refers to two folders."""
    data = write_columns(tmp_path / "columns")
    command = ["dual-encoder", *FLAGS, "--batch", "8", "--steps", "2", "--warmup-steps", "1", "--device", "cpu"]
    command += ["--shards", str(data), "--out", "run"]
    end_well(fork_ranks(run_apart, tmp_path, command, [free_port(), free_port()], size=2, folder=tmp_path))
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_bytes()) for rank in (0, 1))
    for process in (first, second):
        # A slow machine prints its progress first.
        assert "error: --out run is not shared by all nodes: rank 1 on " in process["command"], process["command"]
        assert "cannot see a file that rank 0 on " in process["command"] and "hint: use a folder" in process["command"]
        assert process["shared"] == [], "a probe file was not deleted"
        assert process["late"] == "whole"
    assert (first["missing"], second["missing"]) == (True, False)
    assert not (tmp_path / "0" / "run").exists() and not (tmp_path / "1" / "run").exists()
