"""Conversion of masked autoencoders to and from VideoMAE's checkpoints and transformers' VideoMAEForPreTraining."""

from pathlib import Path

from clipmill.manifests.settings import deferred_checks
from clipmill.train.models.dual_encoder import ModelShape, size_of
from clipmill.train.models.videomae import decoder_size
from clipmill.train.spec import AdoptedModel, ExportRequest
from clipmill.train.tasks.mae.spec import MaeSettings
from clipmill.train.weights.architecture import frame_px_of, match_size, model_name_of
from clipmill.train.weights.exported import Export, require_format
from clipmill.train.weights.files import read_config
from clipmill.train.weights.loading import depth_of
from clipmill.train.weights.source import Say, Source, effective_clip_settings
from clipmill.train.weights.videomae import exported_videomae


def adopted_autoencoder(source: Source, path: Path, *, say: Say) -> AdoptedModel | None:
    """Convert VideoMAE weights, with or without a decoder, to a masked autoencoder.

    Return None if the weights belong to a classifier, or to a model other than VideoMAE.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in source.converted.tensors.items()}
    if source.kind != "videomae" or "head.weight" in shapes:
        return None
    depth = depth_of(shapes, "decoder")
    with deferred_checks():  # the checks of --model do not apply to these weights
        settings = MaeSettings(
            model=model_name_of(source),
            num_frames=(read_config(path / "config.json") or {}).get("num_frames", MaeSettings.num_frames),
            size_px=frame_px_of(source, default=MaeSettings.size_px),
            decoder_depth=depth or MaeSettings.decoder_depth,
        )
        settings = effective_clip_settings(settings, source, say=say)
    size = match_size(size_of(settings.model, settings.towers), source)
    shape = ModelShape(size=size, image_px=settings.size_px)
    return AdoptedModel(settings=settings, shape=shape, missing_part="" if depth else "a decoder")


def exported_autoencoder(request: ExportRequest) -> Export:
    """Export a masked autoencoder to the requested format.

    Raises:
        UserError: The format cannot represent a masked autoencoder.
    """
    require_format(request.format_name, ("hf", "videomae"), what="a masked autoencoder")
    decoder = decoder_size(request.shape.size.video.trunk, depth=request.settings.decoder_depth)
    return exported_videomae(
        request.settings,
        request.weights,
        shape=request.shape,
        format_name=request.format_name,
        model={
            "architectures": ["VideoMAEForPreTraining"],
            # transformers omits the encoder's last layer norm if mean pooling is enabled.
            "use_mean_pooling": False,
            "norm_pix_loss": True,
            "decoder_hidden_size": decoder.width,
            "decoder_num_hidden_layers": decoder.depth,
            "decoder_num_attention_heads": decoder.num_heads,
            "decoder_intermediate_size": decoder.mlp_width,
        },
    )
