"""What a task knows of the step that it computes gradients for."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from train.distributed.world import World

ONE_PROCESS = World()


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of one rank.

    Attributes:
        number: 1, 2, ...
        world: those that share the batch.
        epoch: visits of the whole set that are over before this step, a float; 0 where the set has no end.
        microbatch: samples of this rank that go through the model at once; None for all of them.
        autocast: makes a context in which a model computes in the run's precision.
        scale: of a loss before its backward pass (1 unless fp16 needs it).
        synced: makes a context for the forward and backward pass of a microbatch; ranks exchange gradients in the
            step's last one only, where it is given True.
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
    def random(self, part: int) -> Iterator[None]:
        """Sets torch's generators for microbatch `part`: a function of seed, step, rank, part and stage alone.

        So a microbatch can be computed twice with the same dropout, and no generator needs a place in a checkpoint.
        """
        # The first stage draws what one process draws.
        stage = (self.world.stages.rank,) if self.world.stages.rank else ()
        torch.manual_seed(seed_of(self.seed, self.number, self.world.rank, part, *stage))
        yield


def seed_of(*numbers: int) -> int:
    """A seed in which each of some whole numbers counts."""
    mixed = 0
    for number in numbers:
        # SplitMix64's finalizer (Steele, Lea, Flood 2014).
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed
