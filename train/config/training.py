"""Settings of a training run, as a frozen dataclass whose fields are the flags and the keys of YAML files."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import FRACTION, Checked, GoesWith, Range, errors_of, no_effect_error
from clipmill.manifests.storage.mirrors import show_urls
from clipmill.shards.where_flag import check_where
from clipmill.train.config import fields as groups
from clipmill.train.config.evaluation import EvaluatedData, EvaluationSettings
from clipmill.train.config.fields import FIRST_RUN, Choice, Published, Steps
from clipmill.train.config.shards import RUN_FOLDER, DataSettings, folder_names, normalise_address

OptimizerName = Literal["adamw", "lamb", "lion", "sgd"]

# Hyperparameters of each optimizer, with their defaults.
DEFAULTS: dict[str, dict[str, float]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.98, "eps": 1e-8},  # beta2: CLIP, table 18
    "lamb": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6},  # You et al. 2020, section 4
    "lion": {"beta1": 0.9, "beta2": 0.99},  # Chen et al. 2023, program 1
    "sgd": {"momentum": 0.9},
}


def _rows(
    beta1: float, beta2: float, eps: float, *, source: str = "FastCLIP, tables 7 and 10", **rates: tuple[float, float]
) -> dict[str, Published]:
    """Return FastCLIP's published settings for one size of the data, by optimizer.

    Args:
        rates: Learning rate and weight decay of each optimizer.
    """
    common = {"beta1": beta1, "beta2": beta2, "eps": eps}
    rows = {}
    for name, (lr, weight_decay) in rates.items():
        values = {"lr": lr, "weight_decay": weight_decay}
        group = {key: common[key] for key in DEFAULTS[name] if key in common}
        row = Published(source, values | {"optimizer": group}) if group else Published("FastCLIP, table 10", values)
        rows[name] = row
    return rows


# Wei et al. 2024: table 7 lists betas and epsilon, and table 10 learning rates and weight decays. The public code
# passes the same betas and epsilon to LAMB.
_MEDIUM = _rows(0.9, 0.999, 1e-8, adamw=(1e-3, 0.1), lamb=(2e-3, 0.1), lion=(2e-4, 0.3), sgd=(1.0, 3e-6))
PUBLISHED = {
    "fastclip-medium": _MEDIUM,
    "fastclip-medium-images": _MEDIUM,
    "fastclip-large": _rows(0.9, 0.98, 1e-6, adamw=(4e-4, 0.1), lamb=(2e-3, 0.1), lion=(1e-4, 0.3), sgd=(2.0, 3e-6)),
    "fastclip-xlarge": _rows(0.9, 0.98, 1e-6, source="FastCLIP, table 7", adamw=(2e-4, 0.2)),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Choice):
    """Optimizer, learning rate schedule, and averaging of the weights."""

    prefix = "optimizer"
    choice = "name"
    published = PUBLISHED

    name: OptimizerName = "adamw"
    """Optimizer. lamb: You et al. 2020; lion: Chen et al. 2023; sgd: with momentum."""
    beta1: Annotated[float | None, FRACTION] = None
    """First beta of adamw, lamb and lion. Default: 0.9."""
    beta2: Annotated[float | None, FRACTION] = None
    """Second beta. Default: 0.98 for adamw, 0.999 for lamb, 0.99 for lion."""
    eps: Annotated[float | None, Range(above=0, below=1)] = None
    """Epsilon of adamw and lamb. Default: 1e-8 for adamw, 1e-6 for lamb."""
    momentum: Annotated[float | None, FRACTION] = None
    """Momentum of sgd. Default: 0.9."""
    lamb_alpha: Annotated[Literal["all", "decayed"], GoesWith("name", ("lamb",))] = "all"
    """Parameters whose steps lamb scales. all: all parameters (paper); decayed: only parameters with weight decay
    (FastCLIP's code)."""
    schedule: Literal["cosine", "linear", "fixed"] = "cosine"
    """Learning rate schedule after warmup, from --lr to --optimizer.end-lr. fixed: constant at --lr."""
    start_lr: Annotated[float | None, Range(above=0, hint="use a number above 0, and at most --lr")] = None
    """Learning rate of the first warmup step (AVION: 1e-6). The last warmup step uses --lr. Default: --lr divided by
    --warmup-steps."""
    end_lr: Annotated[float, Range(least=0, hint="use 0 or more, and at most --lr")] = 0.0
    """Final learning rate of the schedule."""
    lr_batch: Annotated[int | None, Range(1, 10**6)] = None
    """Reference batch size: learning rates are multiplied by --batch divided by this value (linear scaling). Default:
    no scaling."""
    layer_decay: Annotated[float, Range(above=0, most=1)] = 1.0
    """Layer-wise learning rate decay: ratio of a block's learning rate to the learning rate of the block above."""
    ema: Annotated[float, FRACTION] = 0.0
    """Decay of an exponential moving average (EMA) of the weights; the averaged weights are evaluated. 0: no EMA."""

    @classmethod
    def hyperparameters(cls) -> dict[str, dict[str, float]]:
        """Return the hyperparameters of each optimizer with their defaults."""
        return DEFAULTS

    def rules(self) -> Iterator[UserError]:
        """Yield errors for hyperparameters that the optimizer does not use."""
        yield from self.unused_hyperparameters()

    def lr_scale(self, batch: int) -> float:
        """Return the factor for learning rates at a batch size: linear scaling (Goyal et al. 2017, section 2.1)."""
        return 1.0 if self.lr_batch is None else batch / self.lr_batch

    def number(self, name: str) -> float:
        """Return the effective `beta1`, `beta2`, `eps` or `momentum`: the value that is set, or the default."""
        value: float | None = getattr(self, name)
        return DEFAULTS[self.name][name] if value is None else value


TYPE_RULE = "type:"
COUNTS_RULE = re.compile(r"\d+(,\d+)*")

Strategy = Literal["ddp", "zero1", "fsdp"]
Schedule = Literal["1f1b", "gpipe"]


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Checked):
    """Distribution of training over several processes."""

    prefix = "parallel"

    strategy: Strategy = "ddp"
    """Data parallelism. ddp: full replicas; zero1: sharded optimizer state; fsdp: sharded weights, gradients and
    optimizer state."""
    stages: Annotated[int, Range(1, 4096)] = 1
    """Number of pipeline stages, with one process per stage. Additional processes form replicas of the pipeline."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule. gpipe: all forward passes, then all backward passes; 1f1b: each backward pass as early as
    possible."""
    partition: str = "parameters"
    """Assignment of layers to stages. parameters: balanced by size; uniform: equal numbers of layers; type:KIND: equal
    numbers of layers of a kind (type:block); 5,9: 5 layers in the first stage, 9 in the second."""

    def rules(self) -> Iterator[UserError]:
        """Yield errors for an invalid partition, and for a strategy that a pipeline does not support."""
        yield from errors_of(check_rule, self.partition)
        if self.stages > 1 and self.strategy == "fsdp":
            yield UserError(
                f"--parallel.strategy fsdp and --parallel.stages {self.stages} cannot be combined",
                hint="use ddp, or zero1 to shard the optimizer state; a stage holds only its own layers anyway",
                flags=("--parallel.strategy", "--parallel.stages"),
            )

    def check_effects(self, typed: Mapping[str, str]) -> Iterator[UserError]:
        """Yield errors for pipeline flags if there is only one stage."""
        for flag in typed if self.stages == 1 else ():
            if flag in (self.flag("schedule"), self.flag("partition")):
                yield no_effect_error(flag, typed, "--parallel.stages is 1", use="--parallel.stages 2 or more")


def check_rule(rule: str) -> None:
    """Raise a UserError if `rule` is not a valid `partition`."""
    if (
        rule in ("parameters", "uniform")
        or COUNTS_RULE.fullmatch(rule)
        or (rule.startswith(TYPE_RULE) and rule != TYPE_RULE)
    ):
        return
    raise UserError(
        f"--parallel.partition {rule!r} is not a valid partition",
        hint="use parameters, uniform, type:KIND (type:block), or the number of layers of each stage (5,9)",
        flags=("--parallel.partition",),
    )


@dataclass(frozen=True, kw_only=True)
class TrackSettings(Checked):
    """Trackers that log metrics in addition to the console and metrics.jsonl."""

    prefix = "track"

    tensorboard: bool = False
    """Write TensorBoard event files to the run folder."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Log to Weights & Biases. offline: to files in the run folder, for `wandb sync`."""
    project: Annotated[str, GoesWith("wandb", ("online", "offline"))] = "clipmill"
    """Weights & Biases project."""


Device = Literal["auto", "cpu", "cuda"]
# Larger values would fail later, with less clear errors about memory, threads or numbers.
STEPS = Range(1, 10**10)
EVERY = Steps(1, 10**10)
COUNT = Range(1, 10**6)
# Types of fields whose defaults depend on the task. Their help texts are inherited.
LearningRate = Annotated[float, groups.TRAINING, FIRST_RUN, Range(1e-12, 1e3)]
WeightDecay = Annotated[float, groups.TRAINING, FIRST_RUN, Range(0, 1e3)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainingSettings(DataSettings):
    """Settings of the training loop, which all tasks share."""

    command: ClassVar[str] = ""
    """Name of the command that uses these settings."""
    free_on_resume: ClassVar[frozenset[str]] = frozenset()
    """Task settings that may differ when a run is resumed, in addition to FREE_ON_RESUME."""
    other_data_values: ClassVar[Mapping[str, Any]] = {}
    """Settings that apply only to the training data, with the values to use for other data."""

    out: Annotated[Path, groups.WHERE, FIRST_RUN, RUN_FOLDER] = Path("run")
    """Run folder for settings, metrics, checkpoints and the results page. A path or an address such as s3://bucket/run;
    with an address, nodes need no shared disk."""
    split: Annotated[str, groups.WHERE, FIRST_RUN] = "train"
    """Split to train on."""
    variant: Annotated[tuple[str, ...], groups.WHERE, groups.SEVERAL] = ()
    """Names of variants to read instead of the current variants, as listed by prep status. A name applies to every data
    folder with a variant of this name. Default: the current variants, or with --resume the variants of the run."""
    where: Annotated[str | None, groups.WHERE] = None
    """Condition on scores, captions and videos that selects the samples to train on, such as 'motion > 0.2 and cuts = 0
    and not duplicate' (docs/data.md). A clip is used if all of its chunks are selected. Default: all samples."""
    share: Annotated[float, groups.WHERE, Range(above=0, most=1)] = 1.0
    """Fraction of the videos to train on. The same --seed selects the same videos; a larger fraction adds videos."""

    steps: Annotated[int, groups.TRAINING, FIRST_RUN, STEPS] = 10_000
    """Number of optimizer steps."""
    batch: Annotated[int, groups.TRAINING, FIRST_RUN, COUNT] = 64
    """Batch size, over all processes."""
    lr: LearningRate = 3e-4
    """Peak learning rate, which is reached at the end of warmup. After that, --optimizer.schedule applies."""
    warmup_steps: Annotated[int | str, groups.TRAINING, FIRST_RUN, Steps(0, 10**10)] = 500
    """Length of the linear warmup, in steps or epochs (0.1ep)."""
    weight_decay: WeightDecay = 0.1
    """Weight decay. Gains, biases and embeddings are not decayed."""
    max_grad_norm: Annotated[float, groups.TRAINING, Range(1e-12, 1e12)] = 1.0
    """Maximum gradient norm (gradient clipping)."""
    seed: Annotated[int, groups.TRAINING, FIRST_RUN, Range(0, 2**63 - 1)] = 0
    """Random seed for weight initialisation, sample order and augmentation."""
    optimizer: Annotated[OptimizerSettings, groups.OPTIMIZER] = field(default_factory=OptimizerSettings)
    """Optimizer, schedule and weight averaging."""
    microbatch: Annotated[int | None, groups.TRAINING, FIRST_RUN, Range(least=1)] = None
    """Number of samples per forward pass of a process. A smaller number saves memory; gradients are still computed for
    the complete batch. Default: all samples of the process in a batch."""

    checkpoint_every: Annotated[int | str, groups.CHECKPOINTS, EVERY] = 500
    """Interval between checkpoints, in steps or epochs (1ep). A checkpoint is also written after the last step."""
    keep_checkpoints: Annotated[int, groups.CHECKPOINTS, COUNT] = 3
    """Number of most recent checkpoints to keep."""
    best: Annotated[str | None, groups.CHECKPOINTS] = None
    """Metric of the evaluation, as SPLIT/METRIC (NAME/METRIC for --evaluate.shards or several --shards). The checkpoint
    with its best value is also kept: the highest value, or the lowest for losses and ranks."""
    parallel: Annotated[ParallelSettings, groups.PARALLEL] = field(default_factory=ParallelSettings)
    """Distribution of training over processes."""

    track: Annotated[TrackSettings, groups.TRACKING] = field(default_factory=TrackSettings)
    """Experiment tracking."""

    evaluate: Annotated[EvaluationSettings, groups.EVALUATION] = field(default_factory=EvaluationSettings)
    """Evaluation during training."""

    device: Annotated[Device, groups.MACHINE, FIRST_RUN] = "auto"
    """Device to train on. auto: the GPU, or the CPU if no GPU can be used; the reason is then printed."""
    require_gpu: Annotated[bool, groups.MACHINE] = False
    """Fail if --device auto finds no usable GPU, instead of training on the CPU."""
    precision: Annotated[Literal["auto", "bf16", "fp16", "tf32", "fp32"], groups.MACHINE, FIRST_RUN] = "auto"
    """Precision of matrix products. auto: bf16 if the GPU supports it, else fp32. Weights and losses are float32."""
    attention: Annotated[Literal["auto", "xformers", "sdpa", "flash", "cudnn", "naive"], groups.MACHINE] = "auto"
    """Attention backend. auto: xformers on a GPU, if it is installed and --compile is not set, else sdpa (PyTorch);
    flash, cudnn: PyTorch's kernel of that name, if it supports the shape; naive: materialises all scores, for
    comparison."""
    compile: Annotated[bool, groups.MACHINE] = False
    """Compile each block with torch.compile: slower start, faster steps."""
    workers: Annotated[int, groups.MACHINE, FIRST_RUN, Range(1, 1024)] = 4
    """Number of decoding threads of each process."""
    decode: Annotated[Literal["packets", "filter", "plain"], groups.MACHINE] = "packets"
    """Decoding path. packets: reads only the packets that the frames need, using the packet table; plain, filter: read
    the container, for comparison."""
    batches_ahead: Annotated[int, groups.MACHINE, Range(1, 1000)] = 2
    """Number of batches to prefetch."""
    max_failures: Annotated[int, groups.MACHINE, Range(0, 10**12)] = 100
    """Number of failed samples that a run tolerates before it stops."""

    def with_data(self, shards: str) -> Self:
        """Return the settings with other data, or with one of the run's data folders."""
        is_run_folder = normalise_address(shards) in map(normalise_address, self.folders)
        # --best refers to the evaluations of the run, which cover all of its folders.
        return replace(self, shards=shards, best=None, **({} if is_run_folder else self.other_data_values))

    @property
    def best_is_lowest(self) -> bool:
        """True if a lower value of `best` is better."""
        return self.best is not None and self.best.rpartition("/")[2] in self.evaluate.lower_is_better

    def evaluated_data(self) -> tuple[EvaluatedData, ...]:
        """Return the data of each evaluation during training: by default, the data folders of the run.

        Raises:
            UserError: --evaluate.shards cannot be parsed.
        """
        if self.evaluate.shards or len(self.folders) == 1:
            return self.evaluate.evaluated_data()
        split, folders = self.evaluate.split, zip(folder_names(self.folders), self.folders, strict=True)
        return tuple(EvaluatedData(name=name, shards=folder, split=split, is_named=False) for name, folder in folders)

    @property
    def selection(self) -> str | None:
        """Condition that selects the training samples, from --where and --share; None for all."""
        if self.share == 1:
            return self.where
        in_share = f"md5(concat(video, ' {self.seed}')) < '{int(self.share * 2**32):08x}'"
        return in_share if self.where is None else f"{in_share} and ({self.where})"

    def rules(self) -> Iterator[UserError]:
        """Yield errors for an invalid --best or --where, learning rates above the peak, and contradictory devices."""
        yield from super().rules()
        if self.best is not None and not self.evaluate.every:
            yield UserError(
                f"--best {self.best} needs evaluations during training",
                hint="add --evaluate.every STEPS",
                flags=("--best",),
            )
        if self.require_gpu and self.device == "cpu":
            yield UserError(
                "--require-gpu and --device cpu contradict each other",
                hint="omit one of them",
                flags=("--require-gpu", "--device"),
            )
        start_lr = self.optimizer.start_lr
        if start_lr is not None and start_lr > self.lr:
            yield UserError(
                f"--optimizer.start-lr {start_lr} is larger than --lr {self.lr}",
                hint="use a smaller --optimizer.start-lr",
                flags=("--optimizer.start-lr", "--lr"),
            )
        yield from errors_of(check_best, self.best, self)
        yield from errors_of(check_where, self.where)
        if self.optimizer.end_lr > self.lr:
            yield UserError(
                f"--optimizer.end-lr {self.optimizer.end_lr} is larger than --lr {self.lr}",
                hint="use a smaller --optimizer.end-lr",
                flags=("--optimizer.end-lr", "--lr"),
            )

    def check_effects(self, typed: Mapping[str, str]) -> Iterator[UserError]:
        """Yield errors for --decode with latents, and for --optimizer.start-lr without warmup."""
        yield from super().check_effects(typed)
        if "--decode" in typed and self.reads_latents:
            yield no_effect_error("--decode", typed, "--input is latents", use="--input pixels")
        flag = self.optimizer.flag("start_lr")
        if flag in typed and self.warmup_steps == 0:
            yield no_effect_error(flag, typed, "--warmup-steps is 0", use="--warmup-steps STEPS")


def check_best(best: str | None, settings: TrainingSettings) -> None:
    """Raise a UserError if `--best` is not a metric of the evaluations. If the metrics are unknown, check nothing."""
    metrics = [
        f"{data.name}/{name}" for data in settings.evaluated_data() for name in settings.evaluate.metric_names(data)
    ]
    if best is not None and metrics and best not in metrics:
        raise UserError(
            f"--best {best} is not a metric of the evaluation",
            hint=f"use one of: {', '.join(metrics)}",
            flags=("--best",),
        )


# Settings that may differ when a run is resumed. They affect the weights only by rounding. The loader reports an error
# if `shards` or `variant` select different samples.
FREE_ON_RESUME = frozenset(
    {
        *("shards", "variant", "cache", "cache_size", "out", "checkpoint_every", "keep_checkpoints", "best"),
        *("evaluate", "track", "device", "require_gpu", "attention", "compile", "parallel", "microbatch", "workers"),
        *("batches_ahead", "max_failures"),
    }
)


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings as a dict with paths as strings. The path of a bucket's mirror becomes the bucket's address."""
    plain = {name: show_urls(str(value)) if isinstance(value, Path) else value for name, value in values.items()}
    return {name: plain_values(value) if isinstance(value, dict) else value for name, value in plain.items()}


def weight_settings(settings: TrainingSettings) -> dict[str, Any]:
    """Return the settings that determine the weights, as plain values by flag name (`optimizer.name`)."""
    values = plain_values(asdict(settings))
    return flatten(
        {name: value for name, value in values.items() if name not in FREE_ON_RESUME | settings.free_on_resume}
    )


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested plain values to a dict whose keys are the names of the flags."""
    flat_values: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat_values |= flatten(value, f"{prefix}{name}.")
        else:
            flat_values[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return flat_values


# Hints for a run that is continued with other settings or data. OLD and NEW are run folders.
NEW_RUN = "start a new run from its weights: --init.weights OLD --out NEW"
RESUME_HINT = (
    "omit these flags, and any --preset or --config that sets them, to continue the run unchanged; or " + NEW_RUN
)


def require_same(
    old_values: dict[str, Any], new_values: dict[str, Any], *, where: str, hint: str = RESUME_HINT
) -> None:
    """Raise a UserError if settings that determine the weights differ.

    Args:
        old_values, new_values: Settings as returned by `weight_settings`.
        where: Source of the old settings, for the message.
        hint: Hint of the error.
    """
    changed_names = [name for name, value in new_values.items() if name in old_values and old_values[name] != value]
    if changed_names:
        templates = [
            f"--{name.replace('_', '-')} is {new_values[name]}, {{}}{old_values[name]}" for name in changed_names
        ]
        differences = [templates[0].format(f"but {where} has "), *(text.format("not ") for text in templates[1:])]
        flags = [f"--{name.replace('_', '-')}" for name in changed_names]
        raise UserError("; ".join(differences), hint=hint, flags=flags)
