"""Train a CLIP-style dual encoder of clips and captions with a contrastive loss.

Clips are pixels or precomputed VAE latents; captions are tokens for a text tower or precomputed text embeddings.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.shards.columns import LATENTS, TEXT, VIDEO, how_to_make
from clipmill.shards.dataset import current_variant
from clipmill.train.config.evaluation import EvaluatedData
from clipmill.train.config.shards import IMAGES, kind_of
from clipmill.train.data.batch import Batch
from clipmill.train.data.decoding.clip import Views
from clipmill.train.data.folders import open_data_folder
from clipmill.train.data.frame_sampling import spread_frames
from clipmill.train.data.inputs import picture_size
from clipmill.train.data.query import (
    TARS_SPLIT,
    Content,
    DataQuery,
    loader_settings,
    open_samples,
)
from clipmill.train.device.random import draw_uniform
from clipmill.train.distributed.world import World
from clipmill.train.engine.task import ClipTask
from clipmill.train.losses.contrastive import DatasetSize, build_contrast
from clipmill.train.losses.objective import Objective
from clipmill.train.models.dual_encoder import DualEncoder, ModelShape, size_of, tokenizer_for
from clipmill.train.tasks.dual_encoder.settings import DualEncoderEvaluation, DualEncoderSettings
from clipmill.train.weights.conversion import CLIP_MEAN, CLIP_STD

if TYPE_CHECKING:
    from clipmill.train.data.mixed_samples import MixedSamples
    from clipmill.train.data.samples import Samples
    from clipmill.train.data.streams.stream import VideoStream
    from clipmill.train.tasks.dual_encoder.evaluation import LoopEvaluation

    OneFolder = Samples[Any] | VideoStream
    AnySamples = OneFolder | MixedSamples


class DualEncoderTask(ClipTask[DualEncoderSettings, "AnySamples", DualEncoder]):
    """The task of `train dual-encoder`."""

    name = "dual-encoder"

    def __init__(self, settings: DualEncoderSettings, **opened: Any) -> None:
        super().__init__(settings, **opened)
        self._in_loop: list[LoopEvaluation] = []
        pictures = LATENTS if settings.reads_latents else VIDEO
        self.columns: tuple[str, ...] = (pictures, TEXT) if settings.text_tower == "frozen" else (pictures,)

    def training_set(self, world: World) -> "AnySamples":
        """This rank's part of the clips and captions of the split that the settings name."""
        samples = self.open_mixture(lambda task: task._with_different_texts(world))
        if self._settings.evaluate.every:
            # Opened now, so that a mistake in its settings is reported before training starts.
            self._in_loop = [self._open_evaluation(one, world) for one in self._settings.evaluated()]
        return samples

    def _with_different_texts(self, world: World) -> "OneFolder":
        samples = self.samples(self._settings.split, world)
        samples.require_different_texts()
        return samples

    def samples_of(self, wanted: DualEncoderEvaluation, world: World, *, num_clips: int = 1) -> "OneFolder":
        """This rank's part of the clips and captions of an evaluation, as its protocol has them.

        Raises:
            UserError: as of `samples`, or they contradict the protocol.
        """
        from clipmill.train.tasks.dual_encoder.protocols import NAMED, protocol_captions

        settings = self._settings
        if wanted.protocol == "zero-shot" and kind_of(settings.folder, settings) is IMAGES:
            from clipmill.train.tasks.dual_encoder.clip_benchmark import class_numbers

            numbers = class_numbers(settings.folder, wanted.classes)
            return self._open(
                world,
                split=TARS_SPLIT,
                content="labels",
                views=Views(num_clips=num_clips),
                tokenize=tokenizer_for(settings.towers),
                classes=(numbers,),
            )
        if settings.reads_latents or not kind_of(settings.folder).has_manifest or wanted.protocol not in NAMED:
            # In multi-instance retrieval, two narrations of one span are two queries.
            each_caption = wanted.protocol == "mir"
            return self.samples(wanted.split, world, num_clips=num_clips, each_caption=each_caption)
        table = protocol_captions(
            open_data_folder(settings.folder, cache=settings.cache, column=None).path,
            wanted.protocol,
            split=wanted.split,
            sources=settings.captions.sources,
        )
        try:
            return self.samples(wanted.split, world, num_clips=num_clips, table=table)
        except UserError as error:
            source = table["source"][0].as_py()
            raise UserError(
                f"{error}; the protocol {wanted.protocol} takes the captions of source {source!r} only", hint=error.hint
            ) from error

    def samples(
        self,
        split: str,
        world: World,
        *,
        num_clips: int = 1,
        each_caption: bool = False,
        table: pa.Table | None = None,
    ) -> "OneFolder":
        """This rank's part of the clips and captions of any split; streamed tars have no splits.

        Args:
            num_clips: temporal views of each clip in an evaluation.
            each_caption: see `open_captioned_clips`.
            table: captions of a protocol, in place of the manifest's.

        Raises:
            UserError: there are none, or they do not fit the settings.
        """
        settings, has_text_tower = self._settings, self._settings.text_tower == "trained"
        if not has_text_tower:
            self._require_texts()
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

    def _open(self, world: World, *, split: str, content: Content, **fields: Any) -> "OneFolder":
        settings = self._settings
        loading = loader_settings(settings, world, device=self._device)
        query = DataQuery(settings=settings, content=content, split=split, loading=loading, **fields)
        samples: OneFolder = open_samples(query)
        return samples

    def _require_texts(self) -> None:
        """Raise UserError if the embeddings that take the place of a text tower are missing."""
        settings = self._settings
        if not kind_of(settings.folder).has_manifest:
            return  # opening them says that tars have no such embeddings
        folder = open_data_folder(settings.folder, cache=settings.cache, column=None)
        if current_variant(folder.path, TEXT) is None:
            raise UserError(
                f"{settings.folder} has no text shards, and --text-tower is frozen",
                hint=f"run {how_to_make(TEXT, settings.folder)}, or train a text tower: --text-tower trained",
                flags=("--text-tower",),
            )

    def new_model(self, samples: "AnySamples") -> DualEncoder:
        """The two towers in the size that the settings name, for clips as `samples` has them."""
        settings, shape = self._settings, self._shape or self._shape_for(samples)
        return DualEncoder(
            shape.size,
            image_px=shape.image_px,
            num_frames=settings.num_frames,
            attend=self._attention.attend,
            towers=settings.towers,
            has_text_tower=settings.text_tower == "trained",
        )

    def _shape_for(self, samples: "AnySamples") -> ModelShape:
        settings = self._settings
        size = size_of(settings.model, settings.towers)
        video, image_px = picture_size(samples, settings)
        width = samples.text_width or size.embedding_width
        return ModelShape(size=replace(size, video=video, embedding_width=width), image_px=image_px)

    def inputs(self, batch: Batch, *, is_training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Clips [B, C, T, H, W] and captions (tokens or stored embeddings) of a batch, as the model takes them."""
        return self.clips(batch, is_training=is_training), _captions(batch)

    def _training_inputs(self, batch: Batch) -> tuple[Any, ...]:
        """`inputs` in training, with the lengths of captions on the host."""
        clips, captions = self.inputs(batch, is_training=True)
        return clips, captions, batch["length"].numpy() if "length" in batch else None

    def clips(self, batch: Batch, *, is_training: bool = False) -> torch.Tensor:
        """Clips [B, C, T, H, W] of a batch, as the video tower takes them."""
        settings = self._settings
        if batch["input"] == "latents":
            within_BK = None
            if is_training:
                positions, count = batch["position"].numpy(), settings.num_frames
                within_BK = draw_uniform(positions, count, seed=settings.seed, purpose="frames")
            latents_BTCHW = spread_frames(batch["latents"], num_frames=settings.num_frames, offset_BK=within_BK)
            return latents_BTCHW.float().transpose(1, 2)
        return self.pixels(batch, slice(None), mean=CLIP_MEAN, std=CLIP_STD, is_training=is_training)

    def build_objective(self, samples: "AnySamples", world: World) -> Objective:
        """The loss that `--loss.*` names."""
        inputs = self._training_inputs
        dataset = _dataset_size(samples, self._settings)
        loss = self._settings.loss.with_scaled_lr(self._settings.optimizer.lr_scale(self._settings.batch))
        return build_contrast(loss, inputs=inputs, dataset=dataset, world=world)

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        """Metrics of the evaluations that the settings name, as `<name>/<metric>`."""
        return {name: value for one in self._in_loop for name, value in one(model, world).items()}

    def _open_evaluation(self, one: EvaluatedData, world: World) -> "LoopEvaluation":
        from clipmill.train.tasks.dual_encoder.evaluation import LoopEvaluation

        task, evaluate = self.on(one.shards), self._settings.evaluate
        protocol = evaluate.protocol if one.protocol is None else evaluate.protocol_named(one.protocol)
        wanted = replace(evaluate, shards=(), split=one.split, protocol=protocol)
        with one.opening():
            samples = task.samples_of(wanted, world)
            found = LoopEvaluation(task, samples, task._settings, wanted=wanted, name=one.name, device=self._device)
        self.note_evaluation(one, samples, means_of=found.means_of, protocol=found.protocol)
        return found


def _dataset_size(samples: "AnySamples", settings: DualEncoderSettings) -> DatasetSize | None:
    """Size of the training set, for losses that keep state for each of its samples.

    Raises:
        UserError: the samples are a stream, without ids.
    """
    if not settings.loss.spec.is_global:
        return None
    if samples.num_samples is None:
        raise UserError(
            f"--loss.kind {settings.loss.kind} keeps a number for each clip, and {settings.folder} is a stream of them",
            hint="name a data folder that prep made, or use --loss.kind infonce",
            flags=("--loss.kind",),
        )
    num_epochs = settings.steps * settings.batch / samples.num_samples
    return DatasetSize(num_clips=samples.num_clips, num_captions=samples.num_caption_ids, num_epochs=num_epochs)


def _captions(batch: Batch) -> torch.Tensor:
    return batch["text"] if "text" in batch else batch["tokens"]
