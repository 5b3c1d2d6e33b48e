"""The properties of an optimizer step that an objective needs, and the step's random numbers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from clipmill.train.distributed.world import World

ONE_PROCESS = World()


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step of one rank.

    Attributes:
        number: Number of the step, from 1.
        epoch: Epochs completed before this step (float); 0 for endless datasets.
        world: Ranks that share the batch.
        seed: Seed of the run.
        microbatch: Number of samples per forward pass on this rank; None for all of them.
        autocast: Function that returns a context in which the model computes with the run's precision.
        scale: Function that scales a loss before its backward pass, for fp16.
        synced: Function that returns the context for a microbatch's forward and backward pass. With True, for the last
            microbatch of the step, the context synchronises gradients.
    """

    number: int
    epoch: float = 0.0
    world: World = ONE_PROCESS
    seed: int = 0
    microbatch: int | None = None
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    scale: Callable[[torch.Tensor], torch.Tensor] = torch.as_tensor
    synced: Callable[[bool], AbstractContextManager[bool | None]] = nullcontext

    @contextmanager
    def seed_generators(self, part: int) -> Iterator[None]:
        """Seed torch's generators for microbatch `part` from seed, step, rank, part and pipeline stage.

        Thus a microbatch can be recomputed with the same dropout, and checkpoints do not need generator states.
        """
        # The first stage draws the same numbers as a single process.
        stage = (self.world.stages.rank,) if self.world.stages.rank else ()
        torch.manual_seed(seed_of(self.seed, self.number, self.world.rank, part, *stage))
        yield


def seed_of(*numbers: int) -> int:
    """Combine integers into a seed."""
    mixed = 0
    for number in numbers:
        # SplitMix64's finalizer (Steele, Lea, Flood 2014).
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed
