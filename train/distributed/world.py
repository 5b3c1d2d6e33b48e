"""The ranks of a run, their collectives, and the optimizer step that they take together.

Without a launcher, the world has size 1, and every collective returns its input. The backend depends on the device of a
tensor: gloo for CPUs, NCCL for GPUs. A world with pipelines contains smaller worlds. Example with 6 ranks and 2 stages:

    rank      0  1  2  3  4  5
    replica   0  0  1  1  2  2    `stages`: the ranks of a replica, which hold one copy of the model and get one batch
    stage     0  1  0  1  0  1    `replicas`: the ranks of a stage, which hold the same layers and divide the batch
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from clipmill.manifests.errors import ClipmillError, UserError
from clipmill.manifests.formatting import count_noun

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, kw_only=True)
class World:
    """Rank of this process in a group of ranks, with the collectives of the group.

    Attributes:
        rank: Rank, from 0 to size - 1.
        size: Number of ranks.
        local_rank: Index of the process on its machine, which is also the index of its GPU.
        group: Process group; None for the group of all ranks.
        replica_world, stage_world: `replicas` and `stages` of a world with pipelines; None without pipelines.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    replica_world: "World | None" = field(default=None, repr=False, compare=False)
    stage_world: "World | None" = field(default=None, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """True for rank 0, which writes the files that only one rank may write."""
        return self.rank == 0

    @property
    def replicas(self) -> "World":
        """Ranks with the same stage as this rank, one per replica. They divide batches and average gradients."""
        return self.replica_world or self

    @property
    def stages(self) -> "World":
        """Ranks of the same replica as this rank, one per stage; without pipelines, only this rank."""
        return self.stage_world or World()

    def cut(self, num_stages: int) -> "World":
        """Divide the ranks into pipelines of `num_stages` ranks. All ranks must call this method.

        Raises:
            UserError: The number of ranks is not a multiple of `num_stages`.
        """
        if num_stages == 1:
            return self
        if self.size % num_stages:
            processes = count_noun(self.size, "process", "processes")
            raise UserError(
                f"--parallel.stages is {num_stages}, but {processes} cannot be divided into pipelines of this length",
                hint=f"launch a multiple of {num_stages} processes, "
                f"for example with torchrun --nproc-per-node {num_stages}",
                flags=("--parallel.stages",),
            )
        num_replicas = self.size // num_stages
        replica, stage = divmod(self.rank, num_stages)
        ranks = range(self.size)
        # Every rank must take part in creating every group.
        groups_by_stage = [_group(ranks[first::num_stages]) for first in range(num_stages)]
        groups_by_replica = [_group(ranks[first : first + num_stages]) for first in ranks[::num_stages]]
        stages = World(rank=stage, size=num_stages, local_rank=self.local_rank, group=groups_by_replica[replica])
        replicas = World(
            rank=replica,
            size=num_replicas,
            local_rank=self.local_rank,
            group=groups_by_stage[stage],
            stage_world=stages,
        )
        return replace(self, replica_world=replicas, stage_world=stages)

    def share(self, batch: int) -> int:
        """Return the number of samples that each rank gets from a batch.

        Raises:
            UserError: The batch cannot be divided equally.
        """
        if batch % self.size:
            suggested_batch = max(self.size, batch - batch % self.size)
            raise UserError(
                f"--batch {batch} is not a multiple of the number of processes, {self.size}",
                hint=f"use --batch {suggested_batch}, or another --nproc-per-node: --batch counts the samples of all "
                "processes",
                flags=("--batch",),
            )
        return batch // self.size

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather N rows from each rank into [size * N, ...], in rank order, without gradients."""
        rows = rows.detach().contiguous()
        if self.size == 1:
            return rows
        all_rows = rows.new_empty((self.size * rows.shape[0], *rows.shape[1:]))
        dist.all_gather_into_tensor(all_rows, rows, group=self.group)
        return all_rows

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values over all ranks, without gradients."""
        total = values.detach().clone()
        if self.size > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum size * N rows over the ranks, and return the N rows of this rank (in rank order), without gradients."""
        rows = rows.detach().contiguous()
        if self.size == 1:
            return rows
        local_rows = rows.new_empty((rows.shape[0] // self.size, *rows.shape[1:]))
        dist.reduce_scatter_tensor(local_rows, rows, group=self.group)
        return local_rows

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather plain values (not tensors) from all ranks, in rank order."""
        if self.size == 1:
            return [value]
        all_values: list[Any] = [None] * self.size
        dist.all_gather_object(all_values, value, group=self.group)
        return all_values

    def each(self, work: Callable[[], Outcome]) -> Outcome:
        """Call `work` on every rank, and return the result on this rank.

        If a rank raises a ClipmillError, all ranks raise the error of the lowest rank that failed.
        """
        if self.size == 1:
            return work()
        try:
            outcome, error = work(), None
        except ClipmillError as raised:
            outcome, error = None, raised
        errors = [failure for failure in self.gather_objects(error) if failure is not None]
        if errors:
            raise errors[0]
        return cast(Outcome, outcome)

    def first(self, work: Callable[[], Outcome]) -> Outcome:
        """Call `work` only on rank 0, and broadcast its result or the ClipmillError that it raised."""
        return self.call_on(0, work)

    def call_on(self, rank: int, work: Callable[[], Outcome]) -> Outcome:
        """Call `work` only on `rank`, and broadcast its result or the ClipmillError that it raised."""
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.rank == rank:
            try:
                outcome[0] = work()
            except ClipmillError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, group=self.group, group_src=rank)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


def joined_world() -> World:
    """Return the world of the process group, or else of the launcher's variables, or else a world of size 1."""
    if dist.is_available() and dist.is_initialized():
        return World(rank=dist.get_rank(), size=dist.get_world_size())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return World(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    return World()


def _group(ranks: range) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(list(ranks)))


def gather_uneven(rows: torch.Tensor, world: World) -> torch.Tensor:
    """Gather rows from all ranks, in rank order. Ranks may have different numbers of rows, including 0."""
    shapes = world.gather(torch.tensor([rows.shape], device=rows.device)).cpu()
    num_rows, width = shapes[:, 0].tolist(), shapes[:, 1:].amax(dim=0).tolist()
    max_rows = max(num_rows)
    padded_rows = rows.new_zeros(max_rows, *width)
    if len(rows):
        padded_rows[: len(rows)] = rows
    parts = world.gather(padded_rows).split(max_rows) if max_rows else [padded_rows]
    return torch.cat([part[:num] for part, num in zip(parts, num_rows, strict=False)])


ONE_PROCESS = World()


@dataclass(frozen=True, kw_only=True)
class Step:
    """Optimizer step of one rank, as seen by an objective.

    Attributes:
        number: Index of the step, starting at 1.
        epoch: Number of epochs before this step, including fractions; 0 for an endless training set.
        world: Ranks that divide the batch.
        seed: Seed of the run.
        microbatch: Number of samples per forward pass on this rank; None for all samples of the rank.
        autocast: Function that returns a context for computing with the precision of the run.
        scale: Function that scales a loss before its backward pass, for fp16.
        sync_context: Function that takes True for the last microbatch of the step, and returns the context for the
            forward and backward pass of a microbatch. The context of the last microbatch synchronises the gradients.
    """

    number: int
    epoch: float = 0.0
    world: World = ONE_PROCESS
    seed: int = 0
    microbatch: int | None = None
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    scale: Callable[[torch.Tensor], torch.Tensor] = torch.as_tensor
    sync_context: Callable[[bool], AbstractContextManager[bool | None]] = nullcontext

    @contextmanager
    def seed_generators(self, part: int) -> Iterator[None]:
        """Seed torch's generators for microbatch `part`, from the seed of the run, step, rank, part and pipeline stage.

        A microbatch can therefore be recomputed with the same dropout, and checkpoints need no generator states.
        """
        # The first stage draws the same random numbers as a single process.
        stage = (self.world.stages.rank,) if self.world.stages.rank else ()
        torch.manual_seed(seed_of(self.seed, self.number, self.world.rank, part, *stage))
        yield


def seed_of(*numbers: int) -> int:
    """Combine integers into a seed."""
    state = 0
    for number in numbers:
        # SplitMix64's finaliser (Steele, Lea, Flood 2014).
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state
