"""Training state: everything that changes from step to step. It is saved to checkpoints and restored from them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.training import TrainingSettings, require_same, weight_settings
from clipmill.train.data.loader import TrainingSet
from clipmill.train.data.order import Cursor, LoaderState, merge_cursors
from clipmill.train.device.precision import Precision, open_precision
from clipmill.train.distributed.parallel import ZeroOptimizer, unshard, wrap_model
from clipmill.train.distributed.storage import dtype_of
from clipmill.train.distributed.world import World
from clipmill.train.engine.metrics import find_non_finite
from clipmill.train.engine.task import ClipTask, Task, take_stage
from clipmill.train.losses.objective import Objective
from clipmill.train.optim.optimizer import make_optimizer
from clipmill.train.optim.parameters import plain_name, set_training_mode
from clipmill.train.run.checkpoint import CheckpointMetadata, check_fits, fill, read_metadata, read_table, removal_hint
from clipmill.train.weights.source import Base

if TYPE_CHECKING:
    from clipmill.train.distributed.pipeline import Pipeline
    from clipmill.train.optim.ema import Ema


@dataclass
class State:
    """State of a run between two steps.

    Attributes:
        model: Model that the task built. With FSDP, the parameters of the model are DTensors.
        trained_module: Module that a training step calls: the model, or its wrapper from
            clipmill.train.distributed.parallel or clipmill.train.distributed.pipeline.
        objective: Objective that computes the loss.
        optimizer: Optimizer of the parameters that this rank updates.
        zero_optimizer: Object that broadcasts the parameters updated by this rank's optimizer; None unless the strategy
            is zero1.
        precision: Autocast and loss scaling of the run.
        ema: Exponential moving average of the weights; None if the run does not use EMA.
        pipeline: The same object as `trained_module` if the model is split into pipeline stages; None otherwise.
        base: Frozen weights that checkpoints omit; None if checkpoints contain all weights.
        step: Number of completed steps.
        cursor: Position in the sample order after the last batch of this rank.
    """

    model: nn.Module
    trained_module: nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    zero_optimizer: ZeroOptimizer | None
    precision: Precision
    ema: "Ema | None"
    pipeline: "Pipeline | None" = None
    base: Base | None = None
    step: int = 0
    cursor: Cursor = field(default_factory=lambda: Cursor(0))

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the model, followed by the parameters of the objective."""
        return [*self.model.parameters(), *self.objective.parameters()]

    @property
    def counted_module(self) -> nn.Module:
        """Module whose calls determine the FLOPs of a step."""
        return self.trained_module if self.pipeline is None else self.model

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the state, keyed by their names in checkpoints. The tensors are not copied."""
        tensors = _weights(self.model, "model.") | _weights(self.objective, "objective.")
        for name in self.base.tensors if self.base else ():
            tensors.pop(f"model.{name}", None)  # other pipeline stages may hold this frozen weight
        if self.ema is not None:
            tensors |= {f"ema.{name}": average for name, average in self.ema.state_dict().items()}
        for name, parameter in self._optimized_parameters().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def facts(
        self,
        task: Task,
        samples: TrainingSet,
        settings: TrainingSettings,
        *,
        world: World,
        metrics: dict[str, float],
    ) -> CheckpointMetadata:
        """Return the metadata of a checkpoint: the state that is not in tensors, and the metrics of the evaluation.

        All ranks must call this method.

        Args:
            metrics: Evaluation metrics at this step, keyed by name; empty if there was no evaluation.
        """
        loader = LoaderState(
            position=self.cursor.position,
            ahead=list(self.cursor.ahead),
            seed=settings.seed,
            samples=samples.fingerprint,
        )
        return CheckpointMetadata(
            task=task.name,
            step=self.step,
            # All pipeline stages of a replica have the same cursor, so gather one cursor per replica.
            loader=world.replicas.gather_objects(loader),
            settings=weight_settings(settings),
            precision=self.precision.state_dict(),
            numbers=metrics,
            base=asdict(self.base) if self.base else {},
        )

    def restore(
        self, path: Path, samples: TrainingSet, settings: TrainingSettings, *, task: Task, world: World
    ) -> CheckpointMetadata:
        """Restore the state from a checkpoint, and return the metadata of the checkpoint.

        All ranks must call this method. The checkpoint may have been written by a different number of ranks.

        Raises:
            UserError: The checkpoint cannot be read, contains values that are not finite, or was written with a
                different task, model or training set, or with different settings.
        """
        facts = read_metadata(path, world=world)
        if facts.task != task.name:
            raise UserError(f"{path} belongs to a run of train {facts.task}", hint="start a new run with another --out")
        require_same(facts.settings, weight_settings(settings), where=str(path))
        samples.load_state_dict(*facts.loader)
        table = read_table(path)
        weights = {name: tensor for name, tensor in self.tensors().items() if not name.startswith("optimizer.")}
        for prefix in ("model.", "ema.", "objective."):
            part = {name: tensor for name, tensor in weights.items() if name.startswith(prefix)}
            check_fits(path, table, _gather_stages(part, world.stages), prefix=prefix)
        moments = self._optimizer_tensors(table)
        moment_tensors = {
            f"optimizer.{name}.{key}": tensor for name, state in moments.items() for key, tensor in state.items()
        }
        fill(path, table, weights | moment_tensors, world=world)
        # The state dict of an optimizer numbers the parameters in the order of its groups.
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        optimized_parameters = self._optimized_parameters()
        optimizer_state = self.optimizer.state_dict()
        optimizer_state["state"] = {indices[id(optimized_parameters[name])]: state for name, state in moments.items()}
        self.optimizer.load_state_dict(optimizer_state)
        if (names := find_non_finite(self.tensors(), world=world)) is not None:
            raise UserError(
                f"checkpoint {path} contains values that are not finite (NaN or infinity) in {names}",
                hint=removal_hint(path),
            )
        if self.base is not None:
            # Use the absolute path from the checkpoint: the run may be resumed in a different working directory.
            self.base = replace(self.base, weights=facts.base["weights"])
        self.precision.load_state_dict(facts.precision)
        self.step = facts.step
        self.cursor = merge_cursors([Cursor(rank["position"], tuple(rank["ahead"])) for rank in facts.loader])
        return facts

    @contextmanager
    def evaluation_model(self) -> Iterator[nn.Module]:
        """Yield the model in evaluation mode, unsharded on every rank. With EMA, the model has the averaged weights."""
        with ExitStack() as stack:
            if self.ema is not None:
                stack.enter_context(self.ema.swap_in(self.model))
            stack.enter_context(unshard(self.model))
            stack.enter_context(torch.no_grad())
            self.model.eval()
            try:
                yield self.model
            finally:
                set_training_mode(self.model)

    def _optimized_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank's optimizer, keyed by their names in checkpoints."""
        optimized_ids = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        pairs = [(f"model.{plain_name(name)}", parameter) for name, parameter in self.model.named_parameters()]
        pairs += [(f"objective.{name}", parameter) for name, parameter in self.objective.named_parameters()]
        return {name: parameter for name, parameter in pairs if id(parameter) in optimized_ids}

    def _optimizer_tensors(self, table: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
        """Return zero-filled buffers for reading this rank's optimizer state: {parameter name: {key: tensor}}."""
        keys: dict[str, list[str]] = {}
        for name in table:
            if name.startswith("optimizer."):
                parameter_name, _, key = name.removeprefix("optimizer.").rpartition(".")
                keys.setdefault(parameter_name, []).append(key)
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self._optimized_parameters().items():
            for key in keys.get(name, []):
                entry = table[f"optimizer.{name}.{key}"]
                # A tensor with the shape of the parameter is sharded like the parameter. The step count is on the CPU.
                has_same_shape = key != "step" and entry["size"] == list(parameter.shape)
                dtype = dtype_of(entry["dtype"])
                value = (
                    torch.zeros_like(parameter, dtype=dtype)
                    if has_same_shape
                    else torch.zeros(entry["size"], dtype=dtype)
                )
                tensors.setdefault(name, {})[key] = value
        return tensors


def new_state(
    task: Task, samples: TrainingSet, settings: TrainingSettings, *, world: World, device: torch.device
) -> State:
    """Return the state of a run before the first step. Random initial weights depend only on the seed."""
    torch.manual_seed(settings.seed)
    # Build the complete model before taking a stage from it, so that weights do not depend on the stages.
    model = take_stage(task, task.build_model(samples), settings.parallel, stages=world.stages).to(device)
    objective = task.build_objective(samples, world.replicas).to(device)
    set_training_mode(model)
    precision = open_precision(settings.precision, device_type=device.type)
    trained_module: nn.Module
    pipeline: Pipeline | None = None
    if world.stages.size > 1:
        from clipmill.train.distributed import pipeline as pipelines

        trained_module = pipeline = pipelines.Pipeline(model, settings=settings.parallel, world=world, device=device)
    else:
        trained_module = wrap_model(
            model,
            strategy=settings.parallel.strategy,
            units=task.units(model),
            world=world,
            device=device,
            matmul_dtype=precision.matmul_dtype,
        )
    optimizer = make_optimizer(model, objective, settings)
    ema: Ema | None = None
    if settings.optimizer.ema:
        from clipmill.train.optim import ema as averages

        ema = averages.Ema(model, decay=settings.optimizer.ema)
    is_zero = settings.parallel.strategy == "zero1" and world.replicas.size > 1
    return State(
        model=model,
        trained_module=trained_module,
        objective=objective,
        optimizer=optimizer,
        zero_optimizer=ZeroOptimizer(optimizer, world.replicas) if is_zero else None,
        precision=precision,
        ema=ema,
        pipeline=pipeline,
        base=task.base if isinstance(task, ClipTask) else None,
    )


def _weights(module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    weights = {f"{prefix}{plain_name(name)}": tensor for name, tensor in module.state_dict().items()}
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is not a tensor: checkpoints can hold only tensors")
    return weights


def _gather_stages(tensors: dict[str, torch.Tensor], stages: World) -> dict[str, torch.Tensor]:
    """Return the tensors of all pipeline stages. If there are several stages, all tensors are on the meta device."""
    if stages.size == 1:
        return tensors
    sizes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    all_sizes = {name: size for stage in stages.gather_objects(sizes) for name, size in stage.items()}
    return {name: torch.empty(size, device="meta") for name, size in all_sizes.items()}
