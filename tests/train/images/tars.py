"""Tars of images as img2dataset writes them, with images that can be told apart."""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Files = Mapping[str, bytes]  # files of a sample by extension
COLOURS = ("red", "green", "blue")


def picture(number: int, *, width: int = 40, height: int = 30) -> NDArray[np.uint8]:
    """Return an RGB image [H, W, 3] with an individual smooth pattern in the colour `number % 3`."""
    rng = np.random.default_rng(number)
    coarse = rng.integers(0, 60, (3, 4, 3)).astype(np.uint8)
    coarse[..., number % 3] += 180
    return np.asarray(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR), np.uint8)


def encode_image(pixels: NDArray[np.uint8] | Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    """Encode an image file with Pillow."""
    content = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(content, kind, **options)
    return content.getvalue()


def sample(number: int) -> Files:
    """Return an image sample.

    There are three image formats and two members for the caption; the class is the colour.
    """
    extension, kind = (("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP"))[number // 3 % 3]
    caption = f"a {COLOURS[number % 3]} picture {number}"
    text_members = {"txt": caption.encode()} if number % 2 else {"json": json.dumps({"caption": caption}).encode()}
    return {extension: encode_image(picture(number), kind), **text_members, "cls": str(number % 3).encode()}


def write_tar(path: Path, samples: Iterable[tuple[str, Files]]) -> Path:
    """Write a tar of samples by key."""
    with tarfile.open(path, "w") as tar:
        for key, files in samples:
            for extension, content in files.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def write_tars(folder: Path, *, num_tars: int = 3, num_samples: int = 6) -> str:
    """Write tars of consecutively numbered `sample`s, and return their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    for tar in range(num_tars):
        numbers = range(tar * num_samples, (tar + 1) * num_samples)
        write_tar(folder / f"{tar:05d}.tar", ((f"{number:09d}", sample(number)) for number in numbers))
    return str(folder / f"{{00000..{num_tars - 1:05d}}}.tar")
