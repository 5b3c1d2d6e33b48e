"""What an evaluation looks at of a clip, in words that stand beside its numbers."""

from train.config.training import ClipSettings
from train.data.decoding.clip import Views

_ONE_LOOK = Views()


def clip_in_words(
    settings: ClipSettings, *, views: Views = _ONE_LOOK, mean_of: str = "", is_in_row: bool = False
) -> str:
    """Frames, their moments, looks, crop and size; of latents frames and moments.

    Args:
        views: looks at a clip of pixels.
        mean_of: what is averaged where there are several.
        is_in_row: the frames of latents are neighbours.
    """
    frames = f"T = {settings.num_frames} frames"
    if getattr(settings, "input", "pixels") == "latents":
        which = "in a row, in the middle" if is_in_row else "one in the middle of each of equal parts"
        segment: str = settings.segment  # type: ignore[attr-defined]
        return f"{frames} of latents of a segment of {segment}, {which}"
    crops = "1 crop (centre square)" if views.num_crops == 1 else f"{views.num_crops} crops along the longer side"
    moments = _moments(settings, is_in_middle=views.num_clips == 1)
    if len(views) == 1:
        return f"{frames}, {moments}, {crops}, {settings.size_px} px"
    clips = "1 clip" if views.num_clips == 1 else f"{views.num_clips} clips"
    return f"{frames}, {moments}, {clips} x {crops}, {settings.size_px} px, mean of their {mean_of}"


def _moments(settings: ClipSettings, *, is_in_middle: bool) -> str:
    """Several clips lie at places that are spread over the span, one in its middle."""
    middle = "the middle of " if is_in_middle else ""
    return {
        "uniform": f"one in {middle}each of equal parts",
        "stride": f"every {settings.stride} frames{', in the middle' if is_in_middle else ''}",
        "lavila": f"one in {middle}each of LaViLa's parts",
    }[settings.sampling]
