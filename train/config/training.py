"""Settings of a training run: a frozen dataclass whose fields are the flags and the keys of the YAML files."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from manifests.errors import UserError
from train.config.data import Augment
from train.config.evaluation import EvaluationSettings
from train.config.machine import ParallelSettings, TrackSettings
from train.config.model import Init, ModelName, Towers, check_frames
from train.config.optim import OptimizerSettings

if TYPE_CHECKING:
    pass

from train.config.model import Kind

_WHERE = Parameter(group="Where")
_CLIPS = Parameter(group="Clips")
_AUGMENT = Parameter(group="Augmentation")
_TRAINING = Parameter(group="Training")
_NOTHING = Augment()
_OPTIMIZER = Parameter(group="Optimizer")
_ADAMW = OptimizerSettings()
_TRACKING = Parameter(group="Tracking")
_UNTRACKED = TrackSettings()
_TOWERS = Parameter(group="Towers")
_PLAIN = Towers()
_INIT = Parameter(group="Weights to start from", negative_iterable=(), consume_multiple=True)
_RANDOM = Init()
_EVALUATION = Parameter(group="Evaluation")
_NO_EVALUATION = EvaluationSettings()
_CHECKPOINTS = Parameter(group="Checkpoints")
_PARALLEL = Parameter(group="Parallel")
_COPIES = ParallelSettings()
_MACHINE = Parameter(group="Machine")

# Least and most: what lies beyond would fail later and less clearly, for want of memory, threads or digits.
_RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, 10**10),
    "batch": (1, 10**6),
    "lr": (1e-12, 1e3),
    "warmup_steps": (0, 10**10),
    "weight_decay": (0, 1e3),
    "max_grad_norm": (1e-12, 1e12),
    "seed": (0, 2**63 - 1),
    "checkpoint_every": (1, 10**10),
    "keep_checkpoints": (1, 10**6),
    "workers": (1, 1024),
    "batches_ahead": (1, 1000),
    "max_failures": (0, 10**12),
}
_CLIP_RANGES: dict[str, tuple[float, float]] = {
    "num_frames": (1, 1024),
    "stride": (1, 10**6),
    "size_px": (2, 4096),
    "samples_per_chunk": (1, 10**6),
}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What the loop needs to know, whatever it trains."""

    command: ClassVar[str] = ""
    """The command whose settings these are."""
    free_on_resume: ClassVar[frozenset[str]] = frozenset()
    """Settings of the task that may differ when a run is resumed, besides FREE_ON_RESUME."""

    shards: Annotated[str, _WHERE] = "data"
    """Data folder that prep made, a path or an address (s3://bucket/data); or tars: 'DIR/{000000..000099}.tar'."""
    cache: Annotated[Path | None, _WHERE] = None
    """Folder for copies of what --shards has elsewhere; the user's cache folder when left out."""
    out: Annotated[Path, _WHERE] = Path("run")
    """Folder of the run: settings, metrics, checkpoints, results page."""
    split: Annotated[str, _WHERE] = "train"
    """Split to train on."""

    steps: Annotated[int, _TRAINING] = 10_000
    """Optimizer steps."""
    batch: Annotated[int, _TRAINING] = 64
    """Samples of a step, of all processes together."""
    lr: Annotated[float, _TRAINING] = 3e-4
    """Highest learning rate, reached after the warm-up; then --optimizer.schedule takes over."""
    warmup_steps: Annotated[int, _TRAINING] = 500
    """Steps over which the learning rate rises."""
    weight_decay: Annotated[float, _TRAINING] = 0.1
    """Decay of matrices (gains, biases and embeddings have none)."""
    max_grad_norm: Annotated[float, _TRAINING] = 1.0
    """Longer gradients are shortened to this length."""
    seed: Annotated[int, _TRAINING] = 0
    """Of weights, order and crops."""
    optimizer: Annotated[OptimizerSettings, _OPTIMIZER] = _ADAMW
    """How weights follow gradients."""
    microbatch: Annotated[int | None, _TRAINING] = None
    """Samples that one process computes at once, for batches larger than memory; all its share when left out."""

    checkpoint_every: Annotated[int, _CHECKPOINTS] = 500
    """Steps between checkpoints; the last step always makes one."""
    keep_checkpoints: Annotated[int, _CHECKPOINTS] = 3
    """How many of the latest checkpoints stay."""
    best: Annotated[str | None, _CHECKPOINTS] = None
    """Number of --evaluate whose best checkpoint stays too: the highest, or the lowest of a loss or rank."""
    parallel: Annotated[ParallelSettings, _PARALLEL] = _COPIES
    """How a model is spread over processes."""

    track: Annotated[TrackSettings, _TRACKING] = _UNTRACKED
    """Who else gets the numbers."""

    evaluate: Annotated[EvaluationSettings, _EVALUATION] = _NO_EVALUATION
    """Evaluation while the model is trained."""

    device: Annotated[Literal["auto", "cpu", "cuda"], _MACHINE] = "auto"
    """Where the model runs."""
    precision: Annotated[Literal["auto", "bf16", "fp16", "tf32", "fp32"], _MACHINE] = "auto"
    """Of the model's products; auto: bf16 where the GPU has it, else fp32. Weights and losses are float32."""
    attention: Annotated[Literal["auto", "xformers", "sdpa", "flash", "cudnn", "naive"], _MACHINE] = "auto"
    """Implementation of attention. auto: the fastest, measured when a run begins on a GPU; flash, cudnn: torch's kernel
    of that name, where it supports the shape; naive: keeps all scores in memory, to compare."""
    compile: Annotated[bool, _MACHINE] = False
    """Compile each block of the model with torch.compile: slower to start, then faster."""
    workers: Annotated[int, _MACHINE] = 4
    """Threads that decode."""
    decode: Annotated[Literal["packets", "filter", "plain"], _MACHINE] = "packets"
    """packets: only what the frames need, by the packet table; plain, filter: through the container, to compare."""
    batches_ahead: Annotated[int, _MACHINE] = 2
    """Batches that are decoded ahead."""
    max_failures: Annotated[int, _MACHINE] = 100
    """Samples that may fail before the run stops."""

    def __post_init__(self) -> None:
        _check_ranges(self, _RANGES)
        if self.microbatch is not None:
            _require("microbatch", self.microbatch, self.microbatch >= 1, "1 or more")
        if self.best is not None and not self.evaluate.every:
            raise UserError(f"--best {self.best} needs an evaluation in the loop", hint="add --evaluate.every STEPS")
        if self.optimizer.end_lr > self.lr:
            raise UserError(
                f"--optimizer.end-lr is {self.optimizer.end_lr}, more than --lr {self.lr}", hint="use a smaller one"
            )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClipSettings(TrainingSettings):
    """What clips look like, and the tower that sees them."""

    only_kind: ClassVar[Kind | None] = None
    """The kind of tower that the task has, where it has but one."""

    num_frames: Annotated[int, _CLIPS] = 4
    """Pictures of a clip."""
    sampling: Annotated[Literal["uniform", "stride", "lavila"], _CLIPS] = "uniform"
    """uniform: one picture from each of equal parts; stride: every --stride-th frame; lavila: LaViLa's rule."""
    stride: Annotated[int, _CLIPS] = 4
    """Frames from one picture to the next (with --sampling stride); shrinks in a clip that is too short."""
    size_px: Annotated[int, _CLIPS] = 224
    """Side of the square that a picture is resized to (latents have their own)."""
    crop: Annotated[Literal["random", "multi-scale", "centre"], _CLIPS] = "random"
    """Crop of training: random (torchvision's RandomResizedCrop), multi-scale (VideoMAE's) or the centre square."""
    min_crop_area: Annotated[float, _CLIPS] = 0.5
    """Smallest part of a picture's area that a random crop keeps."""
    samples_per_chunk: Annotated[int, _CLIPS] = 1
    """Samples that are visited in a row because they share a chunk, which is then decoded once."""
    augment: Annotated[Augment, _AUGMENT] = _NOTHING
    """Changes of the clips in training."""
    model: Annotated[ModelName, _TRAINING] = "b16"
    """Size of the towers."""
    towers: Annotated[Towers, _TOWERS] = _PLAIN
    """What the towers are made of beyond their size."""
    init: Annotated[Init, _INIT] = _RANDOM
    """Weights to start from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ranges(self, _CLIP_RANGES)
        _require("min_crop_area", self.min_crop_area, 0 < self.min_crop_area <= 1, "more than 0 and at most 1")
        check_frames(self.towers, num_frames=self.num_frames)


def check_best(best: str | None, *, split: str, names: Iterable[str]) -> None:
    """Raises a UserError where `--best` is none of the numbers of an evaluation of `split`."""
    numbers = [f"{split}/{name}" for name in names]
    if best is not None and best not in numbers:
        raise UserError(f"--best {best} is no number of the evaluation", hint=f"there are {', '.join(numbers)}")


def _check_ranges(settings: Any, ranges: dict[str, tuple[float, float]]) -> None:
    for name, (least, most) in ranges.items():
        value = getattr(settings, name)
        _require(name, value, bool(least <= value <= most), f"from {least:,} to {most:,}")


def _require(name: str, value: float, holds: bool, rule: str) -> None:
    if not holds:
        raise UserError(f"--{name.replace('_', '-')} is {value}", hint=f"it must be {rule}")


# What may differ when a run is resumed: it does not change the weights, but for rounding.
FREE_ON_RESUME = frozenset(
    {
        *("shards", "cache", "out", "checkpoint_every", "keep_checkpoints", "best", "evaluate", "track"),
        *("device", "attention", "compile", "parallel", "microbatch", "workers", "batches_ahead", "max_failures"),
    }
)


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Settings as a dict, with paths as strings."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    return {name: plain_values(value) if isinstance(value, dict) else value for name, value in plain.items()}


def shaping(settings: TrainingSettings) -> dict[str, Any]:
    """The settings that decide the weights, as plain values by the names of their flags (`optimizer.name`)."""
    values = plain_values(asdict(settings))
    return flat({name: value for name, value in values.items() if name not in FREE_ON_RESUME | settings.free_on_resume})


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested plain values by the names of their flags."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return found


_GO_ON = "leave it out to go on with the run, or begin a new one with another --out"


def require_same(old: dict[str, Any], new: dict[str, Any], *, where: str, hint: str = _GO_ON) -> None:
    """Raises a UserError where settings that decide the weights are other ones (both as of `shaping`).

    Args:
        where: whose the old ones are.
        hint: what to do then.
    """
    other = [name for name in new if name in old and old[name] != new[name]]
    if other:
        first, *more = [f"--{name.replace('_', '-')} is {new[name]}, {{}}{old[name]}" for name in other]
        words = [first.format(f"{where} has "), *(one.format("not ") for one in more)]
        raise UserError("; ".join(words), hint=hint)
