"""The ranks of a run and their collectives. No other module calls torch.distributed's collectives.

Without a launcher, the world has size 1, and every collective returns its input. The backend depends on the device of a
tensor: gloo for CPUs, NCCL for GPUs. Pipelines are worlds within the world. Example with 6 ranks and 2 stages:

    rank      0  1  2  3  4  5
    replica   0  0  1  1  2  2    the ranks of a replica hold one copy of the model and get the same samples: `stages`
    stage     0  1  0  1  0  1    the ranks of a stage hold the same layers and share the batch: `replicas`
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from clipmill.manifests.errors import ClipmillError, UserError
from clipmill.manifests.formatting import count_noun

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, kw_only=True)
class World:
    """The rank of this process among the ranks of a group.

    Attributes:
        rank: Rank, from 0 to size - 1.
        size: Number of ranks.
        local_rank: Rank within this machine, which is the index of its GPU.
        group: Process group; None for all launched ranks.
        across, along: `replicas` and `stages` of a world with pipelines.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    across: "World | None" = field(default=None, repr=False, compare=False)
    along: "World | None" = field(default=None, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """True if this is rank 0, which writes the files that only one rank writes."""
        return self.rank == 0

    @property
    def replicas(self) -> "World":
        """Ranks with this stage, one per replica. They share batches and average gradients."""
        return self.across or self

    @property
    def stages(self) -> "World":
        """Ranks of this replica, one per stage; without pipelines, only this rank."""
        return self.along or World()

    def cut(self, num_stages: int) -> "World":
        """Divide the ranks into pipelines of `num_stages` ranks. All ranks must call it.

        Raises:
            UserError: The number of ranks is not a multiple of `num_stages`.
        """
        if num_stages == 1:
            return self
        if self.size % num_stages:
            processes = count_noun(self.size, "process", "processes")
            raise UserError(
                f"--parallel.stages is {num_stages}, and {processes} cannot be divided into pipelines of that length",
                hint=f"launch a multiple of {num_stages} processes, as torchrun --nproc-per-node {num_stages} does",
                flags=("--parallel.stages",),
            )
        num_replicas = self.size // num_stages
        replica, stage = divmod(self.rank, num_stages)
        ranks = range(self.size)
        # Every rank must take part in creating every group.
        by_stage = [_group(ranks[first::num_stages]) for first in range(num_stages)]
        by_replica = [_group(ranks[first : first + num_stages]) for first in ranks[::num_stages]]
        along = World(rank=stage, size=num_stages, local_rank=self.local_rank, group=by_replica[replica])
        across = World(rank=replica, size=num_replicas, local_rank=self.local_rank, group=by_stage[stage], along=along)
        return replace(self, across=across, along=along)

    def share(self, batch: int) -> int:
        """Return this rank's number of samples in a batch; UserError if the ranks cannot have equal shares."""
        if batch % self.size:
            nearest = max(self.size, batch - batch % self.size)
            raise UserError(
                f"--batch is {batch}, and {self.size} processes cannot have equal shares of it",
                hint=f"--batch counts the samples of all processes: use --batch {nearest}, or another --nproc-per-node",
                flags=("--batch",),
            )
        return batch // self.size

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather N rows from each rank as [size * N, ...] in rank order, without gradients."""
        rows = rows.detach().contiguous()
        if self.size == 1:
            return rows
        gathered = rows.new_empty((self.size * rows.shape[0], *rows.shape[1:]))
        dist.all_gather_into_tensor(gathered, rows, group=self.group)
        return gathered

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values over all ranks, without gradients."""
        summed = values.detach().clone()
        if self.size > 1:
            dist.all_reduce(summed, group=self.group)
        return summed

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum size * N rows over ranks and return this rank's N rows, in rank order, without gradients."""
        rows = rows.detach().contiguous()
        if self.size == 1:
            return rows
        local_rows = rows.new_empty((rows.shape[0] // self.size, *rows.shape[1:]))
        dist.reduce_scatter_tensor(local_rows, rows, group=self.group)
        return local_rows

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather plain values from all ranks, in rank order."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def each(self, work: Callable[[], Outcome]) -> Outcome:
        """Call `work` on every rank, and return this rank's result.

        If any rank fails, all ranks raise the error of the lowest failed rank.
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
        """Call `work` only on rank 0 and broadcast its result, or the ClipmillError that it raised."""
        return self.one(0, work)

    def one(self, rank: int, work: Callable[[], Outcome]) -> Outcome:
        """Call `work` only on one rank and broadcast its result, or the ClipmillError that it raised."""
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
    """Return the world of the joined process group, else the world that a launcher defined, else a single rank."""
    if dist.is_available() and dist.is_initialized():
        return World(rank=dist.get_rank(), size=dist.get_world_size())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return World(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    return World()


def _group(ranks: range) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(list(ranks)))


def gather_uneven(rows: torch.Tensor, world: World) -> torch.Tensor:
    """Gather different numbers of rows (padded for the collective) in rank order. A rank may have no rows."""
    shapes = world.gather(torch.tensor([rows.shape], device=rows.device)).cpu()
    num_rows, width = shapes[:, 0].tolist(), shapes[:, 1:].amax(dim=0).tolist()
    longest = max(num_rows)
    padded = rows.new_zeros(longest, *width)
    if len(rows):
        padded[: len(rows)] = rows
    parts = world.gather(padded).split(longest) if longest else [padded]
    return torch.cat([part[:num] for part, num in zip(parts, num_rows, strict=False)])
