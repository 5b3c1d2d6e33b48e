"""Masked autoencoders as VideoMAE's own checkpoints, and for transformers' VideoMAEForPreTraining."""

from typing import Any

from train.config.files import load_settings
from train.models.dual_encoder import size_of
from train.models.masked_autoencoder import decoder_size
from train.models.transformer import TransformerSize
from train.run.folder import RunFolder
from train.tasks.mae.settings import MaeSettings
from train.weights.conversion import Tensors
from train.weights.exported import Exported, require_format
from train.weights.hf_videomae import exported_videomae


def exported_autoencoder(run: RunFolder, weights: Tensors, *, form: str) -> Exported:
    """A masked autoencoder.

    Raises:
        UserError: the format cannot hold it.
    """
    require_format(form, ("hf", "videomae"), what="a masked autoencoder")
    settings = load_settings(run.settings, MaeSettings)
    decoder = decoder_size(size_of(settings.model, settings.towers).video.trunk, depth=settings.decoder_depth)
    return exported_videomae(run, settings, weights, form=form, model=pretraining_config(decoder))


def pretraining_config(decoder: TransformerSize) -> dict[str, Any]:
    """The values of a VideoMAEForPreTraining's configuration besides those of its encoder."""
    return {
        "architectures": ["VideoMAEForPreTraining"],
        # Only without mean pooling does the encoder end with a layer norm.
        "use_mean_pooling": False,
        "norm_pix_loss": True,
        "decoder_hidden_size": decoder.width,
        "decoder_num_hidden_layers": decoder.depth,
        "decoder_num_attention_heads": decoder.num_heads,
        "decoder_intermediate_size": 4 * decoder.width,
    }
