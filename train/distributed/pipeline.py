"""Pipeline parallelism: a model is divided into stages, one on each rank of a replica.

Stages exchange one tensor with a row per sample, [R, ...], and optionally one with a row per token, [R * K, L, ...].

Shape suffixes: B samples of a replica, R of a microbatch, K texts of a sample, L tokens of a text.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from clipmill.manifests.errors import ClipmillError, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.config.training import ParallelSettings
from clipmill.train.device.transfer import keep_buffers
from clipmill.train.distributed.parallel import average_gradients
from clipmill.train.distributed.step import Step
from clipmill.train.distributed.world import World

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PipelineBatch:
    """A batch for a pipeline, the same on all stages of a replica except for the inputs.

    Attributes:
        inputs: gives the first stage's input for a slice of samples; only called there.
        tokens_BKL: int64, decoder inputs.
        targets_BKL: int64, targets of the last stage's output.
        loss: loss of an output and its targets, a summand of the whole batch's loss.
    """

    inputs: Callable[[slice], torch.Tensor]
    tokens_BKL: torch.Tensor
    targets_BKL: torch.Tensor
    loss: Loss


class Pipeline(nn.Module):
    """This rank's stage of a model.

    Args:
        part: this stage's layers, called with the previous stage's output (the first: with the inputs) and `tokens`.
            Parameters with the same name on several stages are tied.

    Attributes:
        repeated: parameters of this stage that are tied to those of an earlier one.
    """

    def __init__(self, part: nn.Module, *, settings: ParallelSettings, world: World, device: torch.device) -> None:
        super().__init__()
        self.part = part
        self._settings, self._world, self._device = settings, world, device
        self._others = _tied_stages(part, world.stages)
        own = dict(part.named_parameters())
        first = {name for name, others in self._others.items() if min(others) < world.stages.rank}
        self.repeated = [own[name] for name in sorted(first)]
        self._running = _Running(part, is_first=world.stages.is_first)
        self._borders: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
        self._schedule: tuple[tuple[int, ...], PipelineScheduleSingle] | None = None

    def backward(self, batch: PipelineBatch, step: Step) -> torch.Tensor:
        """Accumulate the gradients of the batch's loss, averaged over replicas, in this stage's parameters.

        Returns:
            The replica's part of the loss, equal on all stages.
        """
        num_samples = len(batch.tokens_BKL)
        size = step.microbatch or num_samples
        losses: list[torch.Tensor] = []

        def loss_of(output: torch.Tensor, targets_RKL: torch.Tensor) -> torch.Tensor:
            loss = batch.loss(output, targets_RKL)
            losses.append(loss.detach())
            # A summand, scaled because gradients are averaged over replicas.
            return step.scale(loss * step.world.size)

        with self._running.of(batch, step, size=size), _own_errors():
            schedule = self._schedule_for(batch, size=size)
            self._running.loss = loss_of
            schedule.step(*self._given(num_samples), **self._also_given(batch), return_outputs=False)
        average_gradients(list(self.part.parameters()), self._world.replicas)
        self._sum_repeated()
        stages = self._world.stages
        total = sum(losses, torch.zeros((), dtype=torch.float64, device=self._device))
        return stages.sum(total)

    def _given(self, num_samples: int) -> tuple[torch.Tensor, ...]:
        # Row numbers stand for the samples, so that only computed samples are turned into pictures.
        return (torch.arange(num_samples),) if self._world.stages.is_first else ()

    def _also_given(self, batch: PipelineBatch) -> dict[str, Any]:
        stages = self._world.stages
        given = {"tokens": batch.tokens_BKL}
        if not stages.is_first:
            given["rows"] = torch.arange(len(batch.tokens_BKL))
        if stages.rank == stages.size - 1:
            given["target"] = batch.targets_BKL
        return given

    def _schedule_for(self, batch: PipelineBatch, *, size: int) -> "PipelineScheduleSingle":
        """The schedule for this microbatch size and text length; the last one is reused."""
        # A slow import that a single process does not need.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        num_samples, num_texts, num_tokens = batch.tokens_BKL.shape
        shape = (num_samples, size, num_texts, num_tokens)
        if self._schedule is not None and self._schedule[0] == shape:
            return self._schedule[1]
        if self._borders is None:
            self._borders = self._measured(batch)
        stages = self._world.stages
        is_last = stages.rank == stages.size - 1
        before = _resize_border(self._borders[0], size, num_texts, num_tokens, num_of_samples=1)
        # All outputs of the last stage have a row per token; some versions of torch check the shapes.
        behind = _resize_border(self._borders[1], size, num_texts, num_tokens, num_of_samples=0 if is_last else 1)
        stage = PipelineStage(
            self._running,
            stages.rank,
            stages.size,
            self._device,
            input_args=(torch.empty(size, dtype=torch.int64, device="meta"),) if stages.is_first else before,
            output_args=behind,
            group=stages.group,
        )
        kind = Schedule1F1B if self._settings.schedule == "1f1b" else ScheduleGPipe
        schedule = kind(stage, num_samples // size, loss_fn=self._running.loss_of, scale_grads=False)
        self._schedule = shape, schedule
        return schedule

    def _measured(self, batch: PipelineBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Find shapes and dtypes of inputs and outputs by running the stages in turn on one sample with one token."""
        stages = self._world.stages
        before: list[torch.Tensor] = []
        behind: list[torch.Tensor] = []
        for rank in range(stages.size):
            measure = partial(self._running.measured, before, batch)
            found = stages.one(rank, measure)
            if rank == stages.rank - 1:
                before = found
            if rank == stages.rank:
                behind = found
        return before, behind

    @torch.no_grad()
    def _sum_repeated(self) -> None:
        """Sum the gradients of tied parameters, with bit-identical results on all stages."""
        stages = self._world.stages
        own = dict(self.part.named_parameters())
        for name, others in self._others.items():
            gradient = own[name].grad
            if gradient is None:
                continue
            of_others = {rank: torch.empty_like(gradient) for rank in others}
            exchanges = [dist.P2POp(dist.isend, gradient, group=stages.group, group_peer=rank) for rank in others]
            exchanges += [
                dist.P2POp(dist.irecv, buffer, group=stages.group, group_peer=rank)
                for rank, buffer in of_others.items()
            ]
            for work in dist.batch_isend_irecv(exchanges):
                work.wait()
            of_all = of_others | {stages.rank: gradient.clone()}
            gradient.copy_(torch.stack([of_all[rank] for rank in sorted(of_all)]).sum(dim=0))


def check_microbatches(num_samples: int, *, size: int, settings: ParallelSettings) -> None:
    """Raise a UserError if microbatches of `size` do not divide a replica's samples or are too few."""
    if num_samples % size:
        raise UserError(
            f"--microbatch is {size}, and a pipeline's share of --batch is {count_noun(num_samples, 'sample')}",
            hint="microbatches of a pipeline must have equal sizes: use a divisor of its share",
            flags=("--microbatch", "--batch"),
        )
    num_parts = num_samples // size
    if settings.schedule == "1f1b" and num_parts < settings.stages:
        fitting = num_samples // settings.stages
        hint = "use a larger --batch" if fitting == 0 else f"use --microbatch {_divisor(num_samples, most=fitting)}"
        raise UserError(
            f"a pipeline of {settings.stages} stages needs as many microbatches, and its share of --batch, "
            f"{num_samples} samples, makes {num_parts} with --microbatch {size}",
            hint=f"{hint}, or --parallel.schedule gpipe, which is idle for most of the time then",
            flags=("--batch", "--microbatch"),
        )


class _Running(nn.Module):
    """A stage's layers as a schedule calls them: with row numbers of samples instead of inputs."""

    def __init__(self, part: nn.Module, *, is_first: bool) -> None:
        super().__init__()
        self.part = part
        self.loss: Loss | None = None
        self._is_first = is_first
        self._batch: PipelineBatch | None = None
        self._step = Step(number=0)
        self._size = 1

    @contextmanager
    def of(self, batch: PipelineBatch, step: Step, *, size: int) -> Iterator[None]:
        """Context in which microbatches of `batch` are run."""
        self._batch, self._step, self._size = batch, step, size
        try:
            yield
        finally:
            self._batch, self.loss = None, None

    def forward(self, *given: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor | None = None) -> Any:
        """The stage's output for a microbatch."""
        assert self._batch is not None
        if self._is_first:
            rows = given[0]
        assert rows is not None
        begin = int(rows[0])
        with self._step.random(begin // self._size), self._step.autocast():
            if self._is_first:
                given = (self._batch.inputs(slice(begin, begin + len(rows))),)
            return self.part(*given, tokens=tokens)

    def loss_of(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of a microbatch of the current batch."""
        assert self.loss is not None
        return self.loss(output, targets)

    def measured(self, before: Sequence[torch.Tensor], batch: PipelineBatch) -> list[torch.Tensor]:
        """The stage's outputs for one sample with one token, as meta tensors."""
        tokens_111 = batch.tokens_BKL[:1, :1, :1]
        given = [torch.zeros_like(one, device=tokens_111.device).requires_grad_(one.requires_grad) for one in before]
        with keep_buffers(self.part), torch.enable_grad(), self._step.autocast():
            if self._is_first:
                given = [batch.inputs(slice(0, 1))]
            # `forward` is called directly so that hooks do not count this call.
            out = self.part.forward(*given, tokens=tokens_111)
        return [
            torch.empty_like(one, device="meta").requires_grad_(one.requires_grad)
            for one in (out if isinstance(out, tuple) else (out,))
        ]


def _resize_border(
    border: Sequence[torch.Tensor], size: int, num_texts: int, num_tokens: int, *, num_of_samples: int
) -> tuple[torch.Tensor, ...]:
    """Resize measured tensors: the first `num_of_samples` have a row per sample, the others one per token."""
    shapes = [(size, *one.shape[1:]) for one in border[:num_of_samples]]
    shapes += [(size * num_texts, num_tokens, *one.shape[2:]) for one in border[num_of_samples:]]
    return tuple(
        torch.empty(shape, dtype=one.dtype, device="meta").requires_grad_(one.requires_grad)
        for shape, one in zip(shapes, border, strict=True)
    )


def _tied_stages(part: nn.Module, stages: World) -> dict[str, list[int]]:
    """The other stages that have the same parameter, by name."""
    own = {name for name, _ in part.named_parameters()}
    of_each = stages.gather_objects(sorted(own))
    found = {
        name: [rank for rank, names in enumerate(of_each) if name in names and rank != stages.rank]
        for name in sorted(own)
    }
    return {name: others for name, others in found.items() if others}


def _divisor(number: int, *, most: int) -> int:
    return next(one for one in range(most, 0, -1) if number % one == 0)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Unwrap errors of a stage's layers, which torch.distributed.pipelining wraps."""
    try:
        yield
    except RuntimeError as error:
        cause = error.__cause__
        if isinstance(cause, ClipmillError | RuntimeError):
            raise cause from None
        raise
