"""Pipeline parallelism: a model is divided into stages, one on each rank of a replica.

`partition` assigns layers to stages, `Pipeline` trains a stage, and `run_along` calls the stages in turn for evaluation
and decoding. Each stage sends the next one a tensor with one row per sample, [R, ...], and optionally a tensor with one
row per text, [R * K, L, ...].

Shape suffixes: B samples of a replica, R samples of a microbatch, K texts of a sample, L tokens of a text.
"""

import itertools
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
from clipmill.train.config.training import COUNTS_RULE, TYPE_RULE, ParallelSettings, check_rule
from clipmill.train.device.transfer import keep_buffers
from clipmill.train.distributed.parallel import average_gradients
from clipmill.train.distributed.world import Step, World

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PipelineBatch:
    """Batch for a pipeline, the same on all stages of a replica.

    Attributes:
        inputs: Function that takes a slice of samples and returns the input of the first stage. Only the first stage
            calls this function.
        tokens_BKL: Input of the decoder, int64.
        targets_BKL: Targets for the output of the last stage, int64.
        loss: Function that takes the output for a microbatch and its targets, and returns the microbatch's contribution
            to the loss of the batch. The contributions are summed.
    """

    inputs: Callable[[slice], torch.Tensor]
    tokens_BKL: torch.Tensor
    targets_BKL: torch.Tensor
    loss: Loss


class Pipeline(nn.Module):
    """Stage of a model on this rank.

    Args:
        part: Layers of this stage. They are called with `tokens` and with the output of the previous stage, or with the
            inputs in the first stage. Parameters with the same name on several stages are tied.

    Attributes:
        repeated_parameters: Parameters of this stage that are tied to parameters of an earlier stage.
    """

    def __init__(self, part: nn.Module, *, settings: ParallelSettings, world: World, device: torch.device) -> None:
        super().__init__()
        self.part = part
        self._settings, self._world, self._device = settings, world, device
        parameters = dict(part.named_parameters())
        names_by_stage = world.stages.gather_objects(sorted(parameters))
        # Other stages that contain a parameter of this stage, keyed by the name of the parameter.
        self._tied_stages: dict[str, list[int]] = {}
        for name in sorted(parameters):
            if tied_stages := [
                rank for rank, names in enumerate(names_by_stage) if name in names and rank != world.stages.rank
            ]:
                self._tied_stages[name] = tied_stages
        repeated_names = {name for name, ranks in self._tied_stages.items() if min(ranks) < world.stages.rank}
        self.repeated_parameters = [parameters[name] for name in sorted(repeated_names)]
        self._layers = _StageLayers(part, is_first=world.stages.is_first)
        self._boundaries: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
        self._schedule: tuple[tuple[int, ...], PipelineScheduleSingle] | None = None

    def backward(self, batch: PipelineBatch, step: Step) -> torch.Tensor:
        """Compute the gradients of the loss of a batch, averaged over replicas, and add them to this stage's gradients.

        Returns:
            This replica's part of the loss, the same on all stages.
        """
        num_samples = len(batch.tokens_BKL)
        size = step.microbatch or num_samples
        losses: list[torch.Tensor] = []

        def loss_of(output: torch.Tensor, targets_RKL: torch.Tensor) -> torch.Tensor:
            loss = batch.loss(output, targets_RKL)
            losses.append(loss.detach())
            # Gradients are averaged over replicas, but the loss of the batch is the sum of the replicas' losses.
            return step.scale(loss * step.world.size)

        stages = self._world.stages
        # Pass row numbers in place of samples, so that inputs are prepared one microbatch at a time.
        rows = torch.arange(num_samples)
        arguments: dict[str, Any] = {"tokens": batch.tokens_BKL}
        if not stages.is_first:
            arguments["rows"] = rows
        if stages.rank == stages.size - 1:
            arguments["target"] = batch.targets_BKL
        with self._layers.use_batch(batch, step, size=size), _unwrap_errors():
            schedule = self._schedule_for(batch, size=size)
            self._layers.loss = loss_of
            schedule.step(*([rows] if stages.is_first else []), **arguments, return_outputs=False)
        average_gradients(list(self.part.parameters()), self._world.replicas)
        self._sum_repeated()
        total = sum(losses, torch.zeros((), dtype=torch.float64, device=self._device))
        return stages.sum(total)

    def _schedule_for(self, batch: PipelineBatch, *, size: int) -> "PipelineScheduleSingle":
        """Return the schedule for a batch in microbatches of `size` samples. The last schedule is reused if it fits."""
        # Import late: the import is slow, and a single process does not need it.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        num_samples, num_texts, num_tokens = batch.tokens_BKL.shape
        shape = (num_samples, size, num_texts, num_tokens)
        if self._schedule is not None and self._schedule[0] == shape:
            return self._schedule[1]
        if self._boundaries is None:
            self._boundaries = self._measure_boundaries(batch)
        stages = self._world.stages
        is_last = stages.rank == stages.size - 1
        inputs = _resize_boundary(self._boundaries[0], size, num_texts, num_tokens, num_sample_tensors=1)
        # All outputs of the last stage have one row per text. Some versions of torch check these shapes.
        outputs = _resize_boundary(
            self._boundaries[1], size, num_texts, num_tokens, num_sample_tensors=0 if is_last else 1
        )
        stage = PipelineStage(
            self._layers,
            stages.rank,
            stages.size,
            self._device,
            input_args=(torch.empty(size, dtype=torch.int64, device="meta"),) if stages.is_first else inputs,
            output_args=outputs,
            group=stages.group,
        )
        kind = Schedule1F1B if self._settings.schedule == "1f1b" else ScheduleGPipe
        schedule = kind(stage, num_samples // size, loss_fn=self._layers.loss_of, scale_grads=False)
        self._schedule = shape, schedule
        return schedule

    def _measure_boundaries(self, batch: PipelineBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Measure the shapes and dtypes of this stage's inputs and outputs with one sample of one token."""
        stages = self._world.stages
        stage_inputs: list[torch.Tensor] = []
        stage_outputs: list[torch.Tensor] = []
        for rank in range(stages.size):
            outputs = stages.call_on(rank, partial(self._layers.measure_outputs, stage_inputs, batch))
            if rank == stages.rank - 1:
                stage_inputs = outputs
            if rank == stages.rank:
                stage_outputs = outputs
        return stage_inputs, stage_outputs

    @torch.no_grad()
    def _sum_repeated(self) -> None:
        """Sum the gradients of tied parameters. The sums are bit-identical on all stages."""
        stages = self._world.stages
        parameters = dict(self.part.named_parameters())
        for name, tied_stages in self._tied_stages.items():
            gradient = parameters[name].grad
            if gradient is None:
                continue
            other_gradients = {rank: torch.empty_like(gradient) for rank in tied_stages}
            exchanges = [dist.P2POp(dist.isend, gradient, group=stages.group, group_peer=rank) for rank in tied_stages]
            exchanges += [
                dist.P2POp(dist.irecv, buffer, group=stages.group, group_peer=rank)
                for rank, buffer in other_gradients.items()
            ]
            for work in dist.batch_isend_irecv(exchanges):
                work.wait()
            all_gradients = other_gradients | {stages.rank: gradient.clone()}
            gradient.copy_(torch.stack([all_gradients[rank] for rank in sorted(all_gradients)]).sum(dim=0))


def check_microbatches(num_samples: int, *, size: int, settings: ParallelSettings) -> None:
    """Raise a UserError if the samples of a replica cannot be divided into enough microbatches of `size`."""
    if num_samples % size:
        raise UserError(
            f"--microbatch {size} does not divide the {count_noun(num_samples, 'sample')} per batch of a pipeline",
            hint="use a divisor of that number: the microbatches of a pipeline must have equal sizes",
            flags=("--microbatch", "--batch"),
        )
    num_parts = num_samples // size
    if settings.schedule == "1f1b" and num_parts < settings.stages:
        max_size = num_samples // settings.stages
        hint = "use a larger --batch"
        if max_size:
            divisor = next(number for number in range(max_size, 0, -1) if num_samples % number == 0)
            hint = f"use --microbatch {divisor}"
        raise UserError(
            f"a pipeline of {settings.stages} stages needs at least {settings.stages} microbatches, but --microbatch "
            f"{size} divides its {num_samples} samples per batch into only {num_parts}",
            hint=f"{hint}, or --parallel.schedule gpipe, whose stages are then idle most of the time",
            flags=("--batch", "--microbatch"),
        )


class _StageLayers(nn.Module):
    """Layers of a stage, as a schedule calls them. The schedule passes row numbers in place of inputs."""

    def __init__(self, part: nn.Module, *, is_first: bool) -> None:
        super().__init__()
        self.part = part
        self.loss: Loss | None = None
        self._is_first = is_first
        self._batch: PipelineBatch | None = None
        self._step = Step(number=0)
        self._size = 1

    @contextmanager
    def use_batch(self, batch: PipelineBatch, step: Step, *, size: int) -> Iterator[None]:
        """Context in which the row numbers refer to samples of `batch`."""
        self._batch, self._step, self._size = batch, step, size
        try:
            yield
        finally:
            self._batch, self.loss = None, None

    def forward(self, *inputs: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor | None = None) -> Any:
        """Return the stage's output for a microbatch."""
        assert self._batch is not None
        if self._is_first:
            rows = inputs[0]
        assert rows is not None
        start = int(rows[0])
        with self._step.seed_generators(start // self._size), self._step.autocast():
            if self._is_first:
                inputs = (self._batch.inputs(slice(start, start + len(rows))),)
            return self.part(*inputs, tokens=tokens)

    def loss_of(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of a microbatch."""
        assert self.loss is not None
        return self.loss(output, targets)

    def measure_outputs(self, stage_inputs: Sequence[torch.Tensor], batch: PipelineBatch) -> list[torch.Tensor]:
        """Return the stage's outputs for one sample with one token, as meta tensors."""
        tokens_111 = batch.tokens_BKL[:1, :1, :1]
        device = tokens_111.device
        inputs = [
            torch.zeros_like(tensor, device=device).requires_grad_(tensor.requires_grad) for tensor in stage_inputs
        ]
        with keep_buffers(self.part), torch.enable_grad(), self._step.autocast():
            if self._is_first:
                inputs = [batch.inputs(slice(0, 1))]
            # Call `forward` directly, so that hooks do not count this call.
            out = self.part.forward(*inputs, tokens=tokens_111)
        return [
            torch.empty_like(output, device="meta").requires_grad_(output.requires_grad)
            for output in (out if isinstance(out, tuple) else (out,))
        ]


def _resize_boundary(
    boundary: Sequence[torch.Tensor], size: int, num_texts: int, num_tokens: int, *, num_sample_tensors: int
) -> tuple[torch.Tensor, ...]:
    """Resize measured tensors. The first `num_sample_tensors` get one row per sample; the others get one per text."""
    shapes = [(size, *tensor.shape[1:]) for tensor in boundary[:num_sample_tensors]]
    shapes += [(size * num_texts, num_tokens, *tensor.shape[2:]) for tensor in boundary[num_sample_tensors:]]
    return tuple(
        torch.empty(shape, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)
        for shape, tensor in zip(shapes, boundary, strict=True)
    )


@contextmanager
def _unwrap_errors() -> Iterator[None]:
    """Raise the errors of a stage's layers directly. torch.distributed.pipelining wraps them in another exception."""
    try:
        yield
    except RuntimeError as error:
        cause = error.__cause__
        if isinstance(cause, ClipmillError | RuntimeError):
            raise cause from None
        raise


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMENSIONS = 6

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class LayerCost:
    """Kind of a layer, such as `block`, and its number of parameters. The partition rules use these values."""

    kind: str
    num_parameters: int


def partition(layers: Sequence[LayerCost], *, num_stages: int, rule: str) -> list[range]:
    """Assign consecutive layers to stages. Each stage gets at least one layer.

    Args:
        rule: `parameters` minimises the number of parameters of the largest stage. `uniform` distributes the layers
            evenly; the first stages get the remainder. `type:KIND` distributes the layers of a kind evenly; every other
            layer joins the stage of the layer before it, or the first stage. `5,9` gives the number of layers in each
            stage.

    Raises:
        UserError: The rule is invalid, there are fewer layers (of this kind) than stages, or the listed numbers do not
            fit.
    """
    check_rule(rule)
    if num_stages > len(layers):
        raise UserError(
            f"--parallel.stages is {num_stages}, but the model has only {count_noun(len(layers), 'layer')}",
            hint=f"use {len(layers)} stages or fewer",
            flags=("--parallel.stages",),
        )
    if COUNTS_RULE.fullmatch(rule):
        counts = [int(part) for part in rule.split(",")]
        if len(counts) != num_stages or sum(counts) != len(layers) or 0 in counts:
            raise UserError(
                f"--parallel.partition {rule} puts {sum(counts)} layers on {len(counts)} stages, but the model has "
                f"{len(layers)} layers, and --parallel.stages is {num_stages}",
                hint=f"list {num_stages} numbers of layers, each at least 1, whose sum is {len(layers)}",
                flags=("--parallel.partition",),
            )
        return _ranges([sum(counts[:stage]) for stage in range(num_stages + 1)])
    if rule == "uniform":
        return _even_ranges(list(range(len(layers))), num_layers=len(layers), num_stages=num_stages)
    if rule.startswith(TYPE_RULE):
        kind = rule.removeprefix(TYPE_RULE)
        indices = [index for index, layer in enumerate(layers) if layer.kind == kind]
        if len(indices) < num_stages:
            kinds = ", ".join(sorted({layer.kind for layer in layers}))
            raise UserError(
                f"--parallel.partition is {rule!r}, but the model has only {count_noun(len(indices), 'layer')} of this "
                f"kind for {num_stages} stages",
                hint=f"use fewer --parallel.stages, or another kind: {kinds}",
                flags=("--parallel.partition",),
            )
        return _even_ranges(indices, num_layers=len(layers), num_stages=num_stages)
    return _balanced_ranges([layer.num_parameters for layer in layers], num_stages=num_stages)


def _even_ranges(indices: list[int], *, num_layers: int, num_stages: int) -> list[range]:
    """Cut the layers so that the layers with these indices are distributed evenly."""
    quotient, remainder = divmod(len(indices), num_stages)
    firsts = [stage * quotient + min(stage, remainder) for stage in range(1, num_stages)]
    return _ranges([0, *(indices[first] for first in firsts), num_layers])


def _balanced_ranges(costs: list[int], *, num_stages: int) -> list[range]:
    """Minimise the cost of the most expensive stage. If several solutions are equally good, fill the first stages."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _num_stages(costs, middle) <= num_stages else (middle + 1, high)
    starts, stage_cost = [0], 0
    for index, cost in enumerate(costs):
        stages_left, layers_left = num_stages - len(starts), len(costs) - index
        # Near the end, start a new stage at each layer if later stages would otherwise get no layer.
        if index > starts[-1] and stages_left and (stage_cost + cost > low or layers_left == stages_left):
            starts.append(index)
            stage_cost = 0
        stage_cost += cost
    return _ranges([*starts, len(costs)])


def _num_stages(costs: list[int], max_cost: int) -> int:
    """Return the minimum number of stages if no stage may cost more than `max_cost`."""
    count, stage_cost = 1, 0
    for cost in costs:
        count, stage_cost = (count, stage_cost + cost) if stage_cost + cost <= max_cost else (count + 1, cost)
    return count


def _ranges(starts: list[int]) -> list[range]:
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def run_along(stages: World, run: Callable[[Tensors], Tensors], *, first: int = 0, device: torch.device) -> Tensors:
    """Call `run` on the ranks of a pipeline in turn, each with the result of the previous rank.

    Args:
        first: First rank that calls `run`. On this rank, the argument of `run` is an empty tuple.

    Returns:
        The result on this rank; an empty tuple on ranks before `first`.
    """
    if stages.rank < first:
        return ()
    outputs = run(_receive_tensors(stages, device=device) if stages.rank > first else ())
    if stages.rank < stages.size - 1:
        send = partial(dist.send, group=stages.group, group_dst=stages.rank + 1)
        send(torch.tensor([len(outputs)]))
        for tensor in outputs:
            send(_header(tensor))
            send(tensor.contiguous())
    return outputs


def broadcast_from_last(stages: World, tensor: torch.Tensor | None, *, device: torch.device) -> torch.Tensor:
    """Broadcast the tensor of the last rank. The other ranks pass None."""
    if stages.size == 1:
        assert tensor is not None
        return tensor
    last_rank = stages.size - 1
    header = _header(tensor if stages.rank == last_rank else None)
    dist.broadcast(header, group=stages.group, group_src=last_rank)
    output = _empty_tensor(header, device=device) if tensor is None else tensor.contiguous()
    dist.broadcast(output, group=stages.group, group_src=last_rank)
    return output


def _receive_tensors(stages: World, *, device: torch.device) -> Tensors:
    receive = partial(dist.recv, group=stages.group, group_src=stages.rank - 1)
    count = torch.zeros(1, dtype=torch.int64)
    receive(count)
    tensors = []
    for _ in range(int(count)):
        header = _header(None)
        receive(header)
        tensors.append(_empty_tensor(header, device=device))
        receive(tensors[-1])
    return tuple(tensors)


def _header(tensor: torch.Tensor | None) -> torch.Tensor:
    """Encode dtype, number of dimensions and shape of a tensor on the CPU, so that no GPU waits; zeros for None."""
    header = torch.zeros(2 + _MAX_DIMENSIONS, dtype=torch.int64)
    if tensor is not None:
        numbers = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
        header[: len(numbers)] = torch.tensor(numbers)
    return header


def _empty_tensor(header: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    dtype, num_dimensions, *shape = header.tolist()
    return torch.empty(shape[:num_dimensions], dtype=_DTYPES[dtype], device=device)
