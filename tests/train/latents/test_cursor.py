"""Ranks, batch sizes and resuming: every sample occurs exactly once per epoch."""

from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.samples import Samples
from tests.train.latents.querying import segments
from tests.train.latents.written import Written

SEED = 11


def loader(written: Written, **settings: Any) -> Samples[Any]:
    return open_latent_segments(
        segments(written.data_dir, split="train", **{"seed": SEED, "can_keep": True, **settings})
    )


def test_a_state_of_other_samples_or_another_order_is_refused(written_data: Written) -> None:
    state = loader(written_data).state_dict()
    for other in ({"captions": "none"}, {"segment": "2.5s"}, {"tails": "pad"}, {"seed": SEED + 1}):
        with pytest.raises(UserError, match=r"state (belongs to other|has seed 11)"):
            loader(written_data, **other).load_state_dict(state)
    loader(written_data, batch=3, num_ranks=2, can_keep=False).load_state_dict(state)


def test_states_of_different_steps_do_not_belong_together(written_data: Written) -> None:
    running = loader(written_data, batch=2, num_ranks=2)
    states = [running.state_dict()]
    next(running.batches())
    states.append(running.state_dict())
    with pytest.raises(UserError, match="were saved after different steps"):
        loader(written_data).load_state_dict(*states)
