"""Masked autoencoders as VideoMAE's own checkpoints, and for transformers' VideoMAEForPreTraining."""

from train.config.files import load_settings
from train.models.dual_encoder import size_of
from train.models.masked_autoencoder import decoder_size
from train.run.folder import RunFolder
from train.tasks.mae.settings import MaeSettings
from train.weights.conversion import Tensors
from train.weights.exported import Exported, require_format
from train.weights.hf_videomae import exported_videomae, pretraining_config


def exported_autoencoder(run: RunFolder, weights: Tensors, *, form: str) -> Exported:
    """A masked autoencoder.

    Raises:
        UserError: the format cannot hold it.
    """
    require_format(form, ("hf", "videomae"), what="a masked autoencoder")
    settings = load_settings(run.settings, MaeSettings)
    decoder = decoder_size(size_of(settings.model, settings.towers).video.trunk, depth=settings.decoder_depth)
    return exported_videomae(run, settings, weights, form=form, model=pretraining_config(decoder))
