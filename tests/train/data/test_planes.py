"""Planes: the same rectangle is cut from luma and chroma of every frame, for every pixel format."""

from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d, interpolate
from torchvision.transforms.functional import crop, resize

from clipmill.train.augment.colour import COLOUR_ENCODINGS
from clipmill.train.augment.model_input import to_rgb_uint8
from clipmill.train.data.clip_frames import (
    ClipBuilder,
    ClipShape,
    Rectangle,
    Views,
    as_yuv420,
    crop_clip,
    crop_clip_in_graph,
    indices_of,
    make_clip,
    rgb_frames,
    simple_rectangle,
)
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.outcomes import SampleFailed


def smooth_frame(width: int, height: int, *, phase: float = 0.0) -> av.VideoFrame:
    """Make a frame with slow waves in Y, U and V, so that interpolation rules differ little."""
    rows, columns = np.mgrid[0:height, 0:width] / 40
    luma = 128 + 80 * np.sin(rows + phase) * np.cos(columns)
    chroma = [128 + 60 * np.sin(columns[::2, ::2] + 2 * phase), 128 + 60 * np.cos(rows[::2, ::2])]
    planes = [plane.round().astype(np.uint8) for plane in (luma, *chroma)]
    flat = np.concatenate([plane.reshape(-1) for plane in planes]).reshape(height * 3 // 2, width)
    frame = av.VideoFrame.from_ndarray(flat, format="yuv420p")
    frame.time_base = Fraction(1, 30)
    return frame


def parts(picture: np.ndarray, size_px: int) -> list[np.ndarray]:
    """Return the Y, U and V planes of an image."""
    num_luma, half_px = size_px * size_px, size_px // 2
    chroma = picture[num_luma:].reshape(2, half_px, half_px)
    return [picture[:num_luma].reshape(size_px, size_px), chroma[0], chroma[1]]


@pytest.mark.parametrize(
    "rectangle", [Rectangle(40, 20, 128, 128), Rectangle(40, 20, 200, 150), Rectangle(7, 5, 99, 81)]
)
def test_every_plane_is_the_rectangle_resized(rectangle: Rectangle) -> None:
    """The reference is torch's antialiased resize of the same rectangle."""
    frame = smooth_frame(320, 240)
    [picture] = crop_clip([frame], rectangle, size_px=64)
    source = frame.to_ndarray()
    chroma = source[240:].reshape(2, 120, 160)
    for plane, whole, scale in zip(parts(picture, 64), (source[:240], *chroma), (1, 2, 2), strict=True):
        top, left = rectangle.top // scale, rectangle.left // scale
        bottom = -(-(rectangle.top + rectangle.height) // scale)
        right = -(-(rectangle.left + rectangle.width) // scale)
        part = torch.from_numpy(whole[top:bottom, left:right].astype(np.float32))[None, None]
        expected = interpolate(part, size=plane.shape, mode="bilinear", antialias=True)[0, 0].numpy()
        assert np.abs(plane - expected).max() < 3 and np.abs(plane - expected).mean() < 0.6


def test_fine_detail_is_averaged_and_not_picked_where_much_is_left_out() -> None:
    """A checkerboard of single pixels becomes grey, because each output pixel averages several input pixels."""
    board = np.indices((256, 256)).sum(axis=0) % 2 * 255
    flat = np.concatenate([board.reshape(-1), np.full(256 * 128, 128)]).reshape(384, 256).astype(np.uint8)
    frame = av.VideoFrame.from_ndarray(flat, format="yuv420p")
    [picture] = crop_clip([frame], Rectangle(0, 0, 256, 256), size_px=64)
    luma = parts(picture, 64)[0]
    assert luma.min() >= 127 and luma.max() <= 128


def test_a_frame_that_is_shown_twice_is_the_same_picture_twice() -> None:
    first, other = smooth_frame(64, 48), smooth_frame(64, 48, phase=1.0)
    clip = crop_clip([first, other, first], Rectangle(0, 0, 48, 48), size_px=32)
    assert np.array_equal(clip[0], clip[2]) and not np.array_equal(clip[0], clip[1])


@pytest.mark.parametrize("num_crops", [1, 3])
@pytest.mark.parametrize("is_training", [True, False])
def test_a_clip_is_the_same_whichever_frame_comes_first(num_crops: int, is_training: bool) -> None:
    first, other = smooth_frame(96, 48), smooth_frame(96, 48, phase=1.0)
    frames = [first, other, first]
    shape = ClipShape(sampling=Sampling(num_frames=3), size_px=32, views=Views(num_crops=num_crops))

    def rng() -> np.random.Generator | None:
        return np.random.default_rng(0) if is_training else None

    expected = make_clip(frames, shape, rng=rng(), in_graph=False, key="v")
    making = ClipBuilder(shape, num_frames=3, rng=rng(), key="v")
    for frame, places in reversed(indices_of(frames).items()):
        making.add(frame, places)
    assert np.array_equal(making.clip().video, expected.video)
    crops = 1 if is_training else num_crops
    assert len(expected.video) == 3 * crops


def test_bilinear_is_within_a_level_of_exact_arithmetic() -> None:
    """This holds for each library that OpenCV may use for the resize. The crop is not aligned."""
    noise = np.random.default_rng(0).integers(0, 256, (240 * 3 // 2, 320), dtype=np.uint8)
    frame = av.VideoFrame.from_ndarray(noise, format="yuv420p")
    rectangle = Rectangle(13, 7, 211, 187)
    luma = parts(crop_clip([frame], rectangle, size_px=128)[0], 128)[0]
    cut = torch.from_numpy(noise[7 : 7 + 187, 13 : 13 + 211].astype(np.float64))[None, None]
    exact = interpolate(cut, size=(128, 128), mode="bilinear")[0, 0].numpy()
    assert np.abs(luma - exact).max() < 1


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_simple_crop_is_a_crop_of_the_resized_frame_to_the_pixel(scale: int, seed: int) -> None:
    """The reference is torchvision, which resizes the short side to 256 and crops 224 pixels."""
    width, height = 456 * scale, 256 * scale
    # Values are multiples of 4, so the mean of four pixels needs no rounding.
    noise = 4 * np.random.default_rng(seed).integers(0, 64, (height * 3 // 2, width), dtype=np.uint8)
    frame = av.VideoFrame.from_ndarray(noise, format="yuv420p")
    shape = ClipShape(sampling=Sampling(num_frames=1), size_px=224, crop="simple")
    clip = make_clip([frame], shape, rng=np.random.default_rng(seed), in_graph=False, key="v")
    drawn = simple_rectangle(width, height, fraction=224 / 256, rng=np.random.default_rng(seed))
    chroma = noise[height:].reshape(2, height // 2, width // 2)
    for plane, whole, grid in zip(parts(clip.video[0], 224), (noise[:height], *chroma), (1, 2, 2), strict=True):
        side, begin = 224 // grid, [offset / grid / scale for offset in (drawn.top, drawn.left)]
        if any(offset % 1 for offset in begin):
            continue  # the chroma planes of the resized frame have no such offset
        exact = torch.from_numpy(whole.astype(np.float64))[None]
        resized = resize(exact, [256 // grid]) if scale == 1 else avg_pool2d(exact, 2)
        assert np.array_equal(plane, crop(resized, int(begin[0]), int(begin[1]), side, side)[0].numpy())


def test_the_filter_graph_gives_the_same_clip_but_for_rounding() -> None:
    frames = [smooth_frame(320, 240, phase=phase) for phase in (0.0, 0.5, 0.5)]
    rectangle = Rectangle(40, 20, 160, 128)
    in_graph = crop_clip_in_graph([*frames, frames[0]], rectangle, size_px=112)
    planes = crop_clip([*frames, frames[0]], rectangle, size_px=112)
    assert in_graph.shape == planes.shape and in_graph.dtype == np.uint8
    assert np.abs(in_graph.astype(int) - planes).mean() < 1.0


@pytest.mark.parametrize("pixel_format", ["yuv444p", "yuv420p10le", "rgb24", "gray", "nv12", "yuvj420p"])
def test_foreign_pixel_formats_keep_their_colours(pixel_format: str) -> None:
    red = np.zeros((48, 64, 3), np.uint8)
    red[..., 0] = 200
    frame = av.VideoFrame.from_ndarray(red, format="rgb24").reformat(format=pixel_format)
    assert as_yuv420(frame).format.name in ("yuv420p", "yuvj420p")
    shape = ClipShape(sampling=Sampling(num_frames=1), size_px=32)
    clip = make_clip([frame], shape, rng=None, in_graph=False, key="v")
    shown = rgb_frames(clip.video, clip.colour, size_px=32)[0][16, 16].astype(int)
    expected = [60, 60, 60] if pixel_format == "gray" else [200, 0, 0]
    assert np.abs(shown - expected).max() <= 6, shown


def test_frames_of_different_sizes_make_no_clip() -> None:
    shape = ClipShape(sampling=Sampling(num_frames=2), size_px=32)
    with pytest.raises(SampleFailed, match="differ in width, height or colour") as caught:
        make_clip([smooth_frame(64, 48), smooth_frame(64, 64)], shape, rng=None, in_graph=False, key="v_0")
    assert (caught.value.key, caught.value.reason) == ("v_0", "chunks_differ")


@pytest.mark.parametrize("colour", range(len(COLOUR_ENCODINGS)))
def test_rgb_on_the_cpu_is_what_the_device_makes_of_the_planes(colour: int) -> None:
    """Values differ by at most two levels, because the CPU path rounds chroma to whole levels."""
    clip = crop_clip([smooth_frame(160, 120, phase=phase) for phase in (0.0, 1.0)], Rectangle(3, 5, 99, 97), size_px=64)
    pictures = rgb_frames(clip, colour, size_px=64).astype(int)
    on_device = to_rgb_uint8(torch.from_numpy(clip)[None], torch.tensor([colour], dtype=torch.uint8), size_px=64)
    difference = np.abs(pictures - on_device[0].numpy())
    assert difference.max() <= 2 and difference.mean() < 0.5
