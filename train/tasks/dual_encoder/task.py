"""Task `train dual-encoder`: samples, model, contrastive loss and initial weights of a CLIP-style dual encoder.

Clips are pixels or precomputed VAE latents. Captions are tokens for a text tower, or precomputed text embeddings.
The initial weights of a run, if any, determine the towers, normalisation, widths, context length and temperature.

Shape suffixes: B clips, C channels, T frames, H height, W width, K drawn frames.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.shards.columns import LATENTS, TEXT, VIDEO, how_to_make
from clipmill.shards.dataset import current_variant
from clipmill.train.config.evaluation import EvaluatedData
from clipmill.train.config.model import LIBRARY, TOWERS, DualEncoderTowers, kind_of
from clipmill.train.config.shards import kind_of as kind_of_data
from clipmill.train.data.batch import Batch
from clipmill.train.data.clip_frames import Views
from clipmill.train.data.data_folder import open_data_folder
from clipmill.train.data.frame_sampling import spread_frames
from clipmill.train.data.query import TARS_SPLIT, Content, DataQuery, loader_settings, open_samples, picture_size
from clipmill.train.device.random import draw_uniform
from clipmill.train.distributed.world import World
from clipmill.train.engine.task import ClipTask
from clipmill.train.losses.contrastive import DatasetSize, build_contrast
from clipmill.train.losses.objective import Objective
from clipmill.train.models.dual_encoder import DualEncoder, ModelShape, library_width, size_of, tokenizer_for
from clipmill.train.models.text import CONTEXT_LENGTH
from clipmill.train.models.transformer import NORM_EPS
from clipmill.train.tasks.dual_encoder.spec import DualEncoderEvaluation, DualEncoderSettings
from clipmill.train.weights.conversion import CLIP_MEAN, CLIP_STD, LOGIT_SCALE, PROJECTION
from clipmill.train.weights.source import Say, Source, choose_value, effective_clip_settings

if TYPE_CHECKING:
    from clipmill.train.data.mixed_samples import MixedSamples
    from clipmill.train.data.samples import Samples
    from clipmill.train.data.video_stream import VideoStream
    from clipmill.train.tasks.dual_encoder.evaluation import LoopEvaluation

    FolderSamples = Samples[Any] | VideoStream
    AnySamples = FolderSamples | MixedSamples


class DualEncoderTask(ClipTask[DualEncoderSettings, "AnySamples", DualEncoder]):
    """The task of `train dual-encoder`."""

    name = "dual-encoder"

    def __init__(self, settings: DualEncoderSettings, **arguments: Any) -> None:
        super().__init__(settings, **arguments)
        self._loop_evaluations: list[LoopEvaluation] = []
        clip_column = LATENTS if settings.reads_latents else VIDEO
        self.columns: tuple[str, ...] = (clip_column, TEXT) if settings.text_tower == "frozen" else (clip_column,)

    def training_set(self, world: World) -> "AnySamples":
        """Open this rank's part of the clips and captions of the training split.

        Raises:
            UserError: The split cannot be opened (see `samples`), all its captions are equal, or an evaluation during
                training has unsuitable data or settings.
        """

        def open_folder(task: DualEncoderTask) -> "FolderSamples":
            samples = task.samples(self._settings.split, world)
            samples.require_different_texts()
            return samples

        samples = self.open_mixture(open_folder)
        if self._settings.evaluate.every:
            # Open the evaluations now, so that errors in their settings are reported before training starts.
            self._loop_evaluations = [self._open_evaluation(data, world) for data in self._settings.evaluated_data()]
        return samples

    def samples_of(self, evaluation: DualEncoderEvaluation, world: World, *, num_clips: int = 1) -> "FolderSamples":
        """Open this rank's part of the clips and captions that an evaluation's protocol needs.

        Args:
            num_clips: Number of temporal views per clip.

        Raises:
            UserError: See `samples`; or the samples do not fit the protocol.
        """
        from clipmill.train.tasks.dual_encoder.protocols import NAMED, protocol_captions

        settings = self._settings
        if evaluation.protocol == "zero-shot" and kind_of_data(settings.folder, settings).has_images:
            from clipmill.train.tasks.dual_encoder.zero_shot import image_classes

            classes = image_classes(settings.folder, evaluation.classes)
            return self._open(
                world,
                split=TARS_SPLIT,
                content="labels",
                views=Views(num_clips=num_clips),
                tokenize=tokenizer_for(settings.towers),
                classes=(classes,),
            )
        if settings.reads_latents or not kind_of_data(settings.folder).has_manifest or evaluation.protocol not in NAMED:
            # In multi-instance retrieval, narrations of the same span are separate queries.
            each_caption = evaluation.protocol == "mir"
            return self.samples(evaluation.split, world, num_clips=num_clips, each_caption=each_caption)
        table = protocol_captions(
            open_data_folder(settings.folder, cache=settings.cache, column=None).path,
            evaluation.protocol,
            split=evaluation.split,
            sources=settings.captions.sources,
        )
        try:
            return self.samples(evaluation.split, world, num_clips=num_clips, table=table)
        except UserError as error:
            source = table["source"][0].as_py()
            raise UserError(
                f"{error}; the protocol {evaluation.protocol} uses only the captions of source {source!r}",
                hint=error.hint,
            ) from error

    def samples(
        self,
        split: str,
        world: World,
        *,
        num_clips: int = 1,
        each_caption: bool = False,
        table: pa.Table | None = None,
    ) -> "FolderSamples":
        """Open this rank's part of the clips and captions of a split. Streamed tars have no splits.

        Args:
            num_clips: Number of temporal views per clip, for evaluations.
            each_caption: True to create a separate sample for each caption (`open_captioned_clips`).
            table: Captions of a protocol, used instead of the captions in the manifest.

        Raises:
            UserError: The split is empty, or the data do not fit the settings.
        """
        settings, has_text_tower = self._settings, self._settings.text_tower == "trained"
        # For data without a manifest, `_open` raises an error.
        if not has_text_tower and kind_of_data(settings.folder).has_manifest:
            folder = open_data_folder(settings.folder, cache=settings.cache, column=None)
            if current_variant(folder.path, TEXT) is None:
                raise UserError(
                    f"{settings.folder} has no text shards, but --text-tower is frozen",
                    hint=f"run {how_to_make(TEXT, settings.folder)}, or train a text tower: --text-tower trained",
                    flags=("--text-tower",),
                )
        return self._open(
            world,
            split=split,
            content="captions",
            views=Views(num_clips=num_clips),
            tokenize=tokenizer_for(settings.towers) if has_text_tower else None,
            has_stored_text=not has_text_tower,
            captions=settings.captions,
            each_caption=each_caption,
            table=table,
        )

    def _open(self, world: World, *, split: str, content: Content, **fields: Any) -> "FolderSamples":
        settings = self._settings
        loading = loader_settings(settings, world, device=self._device)
        query = DataQuery(settings=settings, content=content, split=split, loading=loading, **fields)
        samples: FolderSamples = open_samples(query)
        return samples

    def new_model(self, samples: "AnySamples") -> DualEncoder:
        """Build the model with the configured size, for the resolution of `samples`."""
        settings, shape = self._settings, self._shape
        if shape is None:
            size = size_of(settings.model, settings.towers)
            video, image_px = picture_size(samples, settings)
            width = samples.text_width or size.embedding_width
            shape = ModelShape(size=replace(size, video=video, embedding_width=width), image_px=image_px)
        return DualEncoder(
            shape.size,
            image_px=shape.image_px,
            num_frames=settings.num_frames,
            attend=self._attention.attend,
            towers=settings.towers,
            has_text_tower=settings.text_tower == "trained",
        )

    def inputs(self, batch: Batch, *, is_training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's input: the clips [B, C, T, H, W] and captions (tokens or stored embeddings) of a batch."""
        return self.clips(batch, is_training=is_training), batch["text"] if "text" in batch else batch["tokens"]

    def _training_inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the training `inputs` and the captions' lengths as a NumPy array (None for stored embeddings)."""
        clips, captions = self.inputs(batch, is_training=True)
        return clips, captions, batch["length"].numpy() if "length" in batch else None

    def clips(self, batch: Batch, *, is_training: bool = False) -> torch.Tensor:
        """Return the input of the video tower: the clips [B, C, T, H, W] of a batch."""
        settings = self._settings
        if batch["input"] == "latents":
            offset_BK = None
            if is_training:
                positions, count = batch["position"].numpy(), settings.num_frames
                offset_BK = draw_uniform(positions, count, seed=settings.seed, purpose="frames")
            latents_BTCHW = spread_frames(batch["latents"], num_frames=settings.num_frames, offset_BK=offset_BK)
            return latents_BTCHW.float().transpose(1, 2)
        return self.pixels(batch, slice(None), mean=CLIP_MEAN, std=CLIP_STD, is_training=is_training)

    def build_objective(self, samples: "AnySamples", world: World) -> Objective:
        """Build the objective for the loss settings (`--loss.*`)."""
        dataset = _dataset_size(samples, self._settings)
        loss = self._settings.loss.with_scaled_lr(self._settings.optimizer.lr_scale(self._settings.batch))
        return build_contrast(loss, inputs=self._training_inputs, dataset=dataset, world=world)

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        """Run all evaluations during training, and return their metrics as `<name>/<metric>`."""
        return {name: value for evaluate in self._loop_evaluations for name, value in evaluate(model, world).items()}

    def _open_evaluation(self, data: EvaluatedData, world: World) -> "LoopEvaluation":
        from clipmill.train.tasks.dual_encoder.evaluation import LoopEvaluation

        task, evaluation = self.with_data(data.shards), self._settings.evaluate
        protocol = evaluation.protocol if data.protocol is None else evaluation.find_protocol(data.protocol)
        evaluation = replace(evaluation, shards=(), split=data.split, protocol=protocol)
        with data.explain_errors():
            samples = task.samples_of(evaluation, world)
            loop_evaluation = LoopEvaluation(
                task, samples, task._settings, evaluation=evaluation, name=data.name, device=self._device
            )
        self.record_evaluation(
            data, samples, averaged_items=loop_evaluation.averaged_items, protocol=loop_evaluation.protocol
        )
        return loop_evaluation


def _dataset_size(samples: "AnySamples", settings: DualEncoderSettings) -> DatasetSize | None:
    """Return the size of the training set; None if the loss keeps no values for each sample.

    Raises:
        UserError: The loss keeps values for each sample, but the samples are a stream without IDs.
    """
    if not settings.loss.spec.is_global:
        return None
    if samples.num_samples is None:
        raise UserError(
            f"--loss.kind {settings.loss.kind} keeps an average for each clip, but {settings.folder} is a stream",
            hint="use a data folder made by prep, or --loss.kind infonce",
            flags=("--loss.kind",),
        )
    num_epochs = settings.steps * settings.batch / samples.num_samples
    return DatasetSize(num_clips=samples.num_clips, num_captions=samples.num_caption_ids, num_epochs=num_epochs)


# Losses whose temperature has the same meaning as in CLIP. Other losses start from their default temperatures.
_CLIP_TEMPERATURE_LOSSES = frozenset({"infonce", "mbcl"})


def effective_settings(settings: DualEncoderSettings, source: Source | None, *, say: Say) -> DualEncoderSettings:
    """Return the settings, updated with the towers, normalisation, width and temperature of the initial weights.

    Raises:
        UserError: The weights need a feature that the towers lack, or the task does not support the tower.
    """
    if source is None or source.kind != LIBRARY:  # with weights from a library, the settings already name the towers
        kind = kind_of(settings.towers)
        if TOWERS[kind].build is None:
            supported = [tower.name for tower in TOWERS.list_usable() if tower.build is not None]
            raise UserError(
                f"--towers.kind is {kind}, a tower that train dual-encoder does not support",
                hint=f"omit it, or use one of: {', '.join(supported)}",
                flags=("--towers.kind",),
            )
        settings = replace(settings, towers=replace(settings.towers, kind=kind))
    settings = with_source_towers(settings, source, say=say)
    if (has_text := settings.text_tower == "trained") and library_width(settings.towers) is not None:
        # Record the width, so that later changes to the library's configuration do not affect the run.
        library_embedding = size_of(settings.model, settings.towers).embedding_width
        settings = replace(settings, towers=replace(settings.towers, embedding_width=library_embedding))
    if source is None:
        return settings
    towers, projection = settings.towers, source.converted.tensors.get(PROJECTION)
    # The projection determines the width of the embeddings, unless stored text embeddings determine it.
    if projection is not None and has_text and towers.image is None:
        width = choose_value("--towers.embedding-width", towers.embedding_width, projection.shape[-1], say=say)
        settings = replace(settings, towers=replace(towers, embedding_width=width))
    temperature = _temperature(settings, source, say=say)
    if temperature is not None:
        say(f"weights: initial temperature {temperature:.4g}")
        settings = replace(settings, loss=replace(settings.loss, temperature=temperature))
    return settings


def with_source_towers(settings: DualEncoderSettings, source: Source | None, *, say: Say) -> DualEncoderSettings:
    """Return the settings with the activation, epsilon, normalisation and context length that the weights require.

    Raises:
        UserError: The weights need a feature that the towers lack.
    """
    if source is None:
        return effective_clip_settings(settings, None, say=say)
    facts = source.facts
    if settings.text_tower == "trained" and facts.text_eps is not None and not math.isclose(facts.text_eps, NORM_EPS):
        raise UserError(
            f"{source.title}: the text tower's layer norms have eps {facts.text_eps:g}, but clipmill uses {NORM_EPS:g}",
            hint="use the weights of a plain CLIP",
        )
    settings = effective_clip_settings(settings, source, say=say)
    towers = settings.towers  # not DualEncoderTowers if the settings belong to an exported video tower
    if settings.text_tower == "trained" and isinstance(towers, DualEncoderTowers) and not towers.text:
        positions = source.converted.tensors.get("text.positional_embedding")
        source_length = None if positions is None or len(positions) == CONTEXT_LENGTH else len(positions)
        length = choose_value("--towers.context-length", towers.context_length, source_length, say=say)
        settings = replace(settings, towers=replace(towers, context_length=length))
    return settings


def _temperature(settings: DualEncoderSettings, source: Source, *, say: Say) -> float | None:
    """Return the temperature of the weights; None if it is missing or replaced by another temperature.

    If the run uses a different temperature, the reason is printed.
    """
    loss, tensors = settings.loss, source.converted.tensors
    if LOGIT_SCALE not in tensors:
        return None
    source_temperature = math.exp(-float(tensors[LOGIT_SCALE]))
    projection, width = tensors.get(PROJECTION), settings.towers.embedding_width
    if loss.temperature is not None:
        is_equal = math.isclose(loss.temperature, source_temperature, rel_tol=1e-4)
        reason = "" if is_equal else f"--loss.temperature is {loss.temperature:g}"
    elif loss.kind not in _CLIP_TEMPERATURE_LOSSES:
        reason = f"--loss.kind {loss.kind} does not start from this temperature"
    elif settings.text_tower == "frozen":
        reason = "stored text embeddings replace the text tower"
    elif settings.towers.image is None and (projection is None or projection.shape[-1] != width):
        reason = "the projections are new"
    else:
        return max(source_temperature, loss.min_temperature)
    if reason:
        say(f"weights: temperature {source_temperature:.4g} is not used: {reason}")
    return None
