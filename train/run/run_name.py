"""What a run is called among others: the name of its folder, and the settings that runs are told apart by."""

from train.config.training import ClipSettings, TrainingSettings


def run_name(folder: str, settings: TrainingSettings) -> str:
    """As `captions_b16_nf8_px224_lr5e-07_bs6_st433200_rs42`: model, frames, size, rate, batch, steps, seed."""
    parts = [folder]
    if isinstance(settings, ClipSettings):
        parts += [settings.model, f"nf{settings.num_frames}", f"px{settings.size_px}"]
    parts += [f"lr{settings.lr:g}", f"bs{settings.batch}", f"st{settings.steps}", f"rs{settings.seed}"]
    return "_".join(parts)
