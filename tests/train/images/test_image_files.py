"""Image files as planes: equal to Pillow's decoding and upright; files that are not images are reported."""

import io
import zlib

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from clipmill.train.augment.colour import rgb_matrices
from clipmill.train.data.clip_frames import ClipShape, make_clip
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.producers.tar_images import decode_image
from tests.train.images.tars import encode_image, picture

RGB = Image.fromarray(picture(0, width=63, height=41))
GREY_16 = Image.fromarray(np.asarray(RGB.convert("L")).astype(np.uint16) * 257)
FILES = {
    "jpeg": encode_image(RGB),
    "jpeg 4:4:4": encode_image(RGB, subsampling=0),
    "jpeg 4:2:2": encode_image(RGB, subsampling=1),
    "jpeg progressive": encode_image(RGB, progressive=True),
    "jpeg grey": encode_image(RGB.convert("L")),
    "jpeg cmyk": encode_image(RGB.convert("CMYK")),
    "png": encode_image(RGB, "PNG"),
    "png grey": encode_image(RGB.convert("L"), "PNG"),
    "png palette": encode_image(RGB.quantize(64), "PNG"),
    "png alpha": encode_image(RGB.convert("RGBA"), "PNG"),
    "webp": encode_image(RGB, "WEBP"),
    "webp lossless": encode_image(RGB, "WEBP", lossless=True),
    "webp alpha": encode_image(RGB.convert("RGBA"), "WEBP"),
}


def luma(content: bytes) -> NDArray[np.float64]:
    """Return luma from 0 to 255 (full range) of the decoded file."""
    frame = decode_image(content)
    plane = np.frombuffer(bytes(frame.planes[0]), np.uint8).reshape(frame.height, -1)[:, : frame.width].astype(float)
    is_full = frame.format.name == "yuvj420p" or frame.color_range == 2
    return plane if is_full else (plane - 16) * 255 / 219


def pillows_luma(content: bytes) -> NDArray[np.float64]:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    weights: NDArray[np.float64] = np.asarray(image).astype(float) @ np.array([0.299, 0.587, 0.114])
    return weights


@pytest.mark.parametrize("name", FILES)
def test_luma_is_that_of_pillow(name: str) -> None:
    luma_read, pillow_luma = luma(FILES[name]), pillows_luma(FILES[name])
    assert luma_read.shape == pillow_luma.shape
    # Both libraries mix inks with rounded products.
    assert np.abs(luma_read - pillow_luma).mean() < (1.5 if name == "jpeg cmyk" else 0.6)
    assert np.abs(luma_read - pillow_luma).max() < 4


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    assert np.abs(luma(encode_image(GREY_16, "PNG")) - np.asarray(RGB.convert("L"))).max() <= 1


def test_a_colour_survives_in_every_format() -> None:
    expected = np.array([200, 60, 30])
    for kind in ("JPEG", "PNG", "WEBP"):
        pixels = np.broadcast_to(expected.astype(np.uint8), (32, 32, 3))
        frame = decode_image(encode_image(np.ascontiguousarray(pixels), kind, quality=95))
        clip = make_clip(
            [frame], ClipShape(sampling=Sampling(num_frames=1), size_px=16), rng=None, in_graph=False, key=""
        )
        planes = clip.video[0].astype(float)
        yuv = np.array([planes[:256].mean(), planes[256:320].mean(), planes[320:].mean(), 1])
        assert np.abs(rgb_matrices()[clip.colour] @ yuv * 255 - expected).max() < 3, kind


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_as_their_exif_data_says(kind: str) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = encode_image(RGB, kind, exif=exif)
        luma_read, pillow_luma = luma(content), pillows_luma(content)
        assert luma_read.shape == pillow_luma.shape and np.abs(luma_read - pillow_luma).mean() < 1, orientation


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (FILES["jpeg"][: len(FILES["jpeg"]) // 2], "damaged or truncated"),
        (FILES["png"][: len(FILES["png"]) // 2], "damaged or truncated"),
        (FILES["webp"][: len(FILES["webp"]) - 40], "damaged or truncated"),
        (encode_image(RGB, "PNG", save_all=True, append_images=[RGB.rotate(180)]), "animated PNG"),
        (encode_image(RGB, "WEBP", save_all=True, append_images=[RGB.rotate(180)]), "animated WebP"),
        (encode_image(RGB, "GIF"), "neither JPEG, PNG nor WebP"),
        (b"", "neither JPEG, PNG nor WebP"),
    ],
)
def test_what_is_not_a_whole_image_is_named(content: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decode_image(content)


def test_a_small_file_that_claims_a_huge_image_is_rejected() -> None:
    """The header claims 16,383 x 16,383 pixels."""
    side = 16383
    png, jpeg, webp = (bytearray(FILES[name]) for name in ("png", "jpeg", "webp"))
    png[16:24] = side.to_bytes(4) * 2
    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4)
    header = jpeg.index(b"\xff\xc0")
    jpeg[header + 5 : header + 9] = side.to_bytes(2) * 2
    webp[26:30] = side.to_bytes(2, "little") * 2
    for bomb in (png, jpeg, webp):
        with pytest.raises(ValueError, match="an image of 16383 x 16383 is larger than 67,108,864 pixels"):
            decode_image(bytes(bomb))
