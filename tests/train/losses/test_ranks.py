from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from clipmill.train.distributed.world import World
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.losses.pairs import CASES, objective_of, settings_of
from tests.train.losses.runs import SAVED, run_all, run_rank


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    """Mean gradients and metrics of every loss are equal, and a different number of ranks can read the state."""
    expected, objectives = run_all(World())
    of_steps = dict(expected)
    for kind, convention in SAVED:
        name = f"{kind}/{convention}"
        state = objectives[name].state_dict()
        dcp.save({"objective": state}, checkpoint_id=tmp_path / "by-one" / name, no_dist=True)
        expected |= {f"{name}/loaded/{key}": value for key, value in state.items()}
    end_well(fork_ranks(run_rank, tmp_path, size=2, folder=tmp_path))
    loaded = torch.load(tmp_path / "results.pt", weights_only=True)
    assert loaded.pop("kept rows").tolist() == [5, 4]  # 7 clips are split into 4 and 3, with one spare row on each rank
    assert set(loaded) == set(expected)
    assert len(loaded) > 30 * len(CASES)
    torch.testing.assert_close(loaded, expected, rtol=1e-9, atol=1e-12)
    # The closed form of InfoNCE has the values of its definition on any number of ranks.
    closed, defined = (
        {
            name.removeprefix(f"infonce/{form}/"): tensor
            for name, tensor in loaded.items()
            if name.startswith(f"infonce/{form}")
        }
        for form in ("paper", "defined")
    )
    assert len(closed) >= 3 * 11
    torch.testing.assert_close(closed, defined, rtol=1e-9, atol=1e-12)
    # OpenCLIP's exchange of features, which `train bench` compares, gives the same losses and gradients.
    features = torch.load(tmp_path / "features.pt", weights_only=True)
    of_first = {name: value for name, value in of_steps.items() if "/0/" in name}
    torch.testing.assert_close(features, of_first, rtol=1e-9, atol=1e-12)

    for kind, convention in SAVED:
        name = f"{kind}/{convention}"
        objective = objective_of(settings_of(kind, convention))
        state = objective.state_dict()
        assert not torch.equal(state["clips.rows"], objectives[name].state_dict()["clips.rows"])
        dcp.load({"objective": state}, checkpoint_id=tmp_path / "by-ranks" / name, no_dist=True)
        objective.load_state_dict(state)
        torch.testing.assert_close(objective.state_dict(), objectives[name].state_dict(), rtol=1e-9, atol=1e-12)
