"""Encode latents and text in plain loops, which are the baseline of `benchmarks.encoding`.

python -m benchmarks.plain_loops latents DATA VAE SIZE FPS BATCH OUT
python -m benchmarks.plain_loops text DATA WEIGHTS BATCH OUT
"""

import json
import sys
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clipmill.manifests.store import read_captions
from clipmill.shards.reader import Variant

if TYPE_CHECKING:
    import torch

SEGMENT_FRAMES = 9  # as in the case for a video VAE in benchmarks.encoding


def latents(data: Path, vae: str, *, size: int, fps: Fraction, batch: int, out: Path) -> None:
    """Decode every chunk completely, select frames, and encode the frames in batches."""
    import av
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    model = _vae(vae)
    waiting: list[torch.Tensor] = []
    found: list[np.ndarray] = []

    is_video = not hasattr(model.config, "scaling_factor")

    def encode(pictures: list[torch.Tensor]) -> None:
        found.append((encode_segment if is_video else encode_pictures)(model, torch.stack(pictures)))

    for sample in Variant.open(data).iterate():
        waiting = [] if is_video else waiting
        with av.open(BytesIO(sample["mp4"]), "r") as container:
            container.streams.video[0].codec_context.thread_count = 1
            rate = container.streams.video[0].average_rate or Fraction(30)
            due = Fraction(0)
            for number, frame in enumerate(container.decode(video=0)):
                if number != int(due * rate):
                    continue
                due += 1 / fps
                picture = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
                side = min(picture.shape[1:])
                top, left = ((length - side) // 2 for length in picture.shape[1:])
                square = picture[None, :, top : top + side, left : left + side]
                small = functional.interpolate(square, size=(size, size), mode="bilinear", antialias=True)
                waiting.append(small[0])
                if len(waiting) == (SEGMENT_FRAMES if is_video else batch):
                    encode(waiting)
                    waiting = waiting[-1:] if is_video else []
    if waiting and not is_video:
        encode(waiting)
    np.save(out, np.concatenate(found))


def encode_pictures(model: Any, pictures: "torch.Tensor") -> np.ndarray:
    """Encode uint8 frames [N, 3, H, W] to latents, on the device of the model and in its precision."""
    import torch

    with torch.inference_mode():
        latents = model.encode(pictures.to(model.device, model.dtype) / 127.5 - 1).latent_dist.mean
    scaled: np.ndarray = (latents * model.config.scaling_factor).half().cpu().numpy()
    return scaled


def encode_segment(model: Any, pictures: "torch.Tensor") -> np.ndarray:
    """Encode a uint8 segment [F, 3, H, W] with Wan's VAE to latents [1, C, T', h, w], normalised per channel."""
    import torch

    mean, std = (torch.tensor(one).view(-1, 1, 1, 1) for one in (model.config.latents_mean, model.config.latents_std))
    with torch.inference_mode():
        segment = (pictures.to(model.device, model.dtype) / 127.5 - 1).transpose(0, 1)[None]
        latents = model.encode(segment).latent_dist.mean
    scaled: np.ndarray = ((latents - mean) / std).half().cpu().numpy()
    return scaled


def encode_texts(model: Any, tokenize: Any, texts: list[str], *, device: str = "cpu") -> np.ndarray:
    """Encode a batch of texts."""
    import torch

    with torch.inference_mode():
        rows = model.encode_text(tokenize(texts).to(device), normalize=True)
    return np.asarray(rows.half().cpu().numpy())


def text(data: Path, weights: Path, *, batch: int, out: Path) -> None:
    """Tokenise and encode every caption in batches."""
    import open_clip
    import torch

    torch.set_num_threads(1)
    model = open_clip.create_model("ViT-B-32", pretrained=str(weights)).eval()
    tokenize = open_clip.get_tokenizer("ViT-B-32")
    texts = read_captions(data)["text"].to_pylist()
    found = []
    for begin in range(0, len(texts), batch):
        found.append(encode_texts(model, tokenize, texts[begin : begin + batch]))
    np.save(out, np.concatenate(found))


def _vae(name: str):  # type: ignore[no-untyped-def]
    import diffusers

    if name != "tiny":
        kind = json.loads((Path(name) / "config.json").read_bytes())["_class_name"]
        model = getattr(diffusers, kind).from_pretrained(name)
    else:
        from clipmill.prep.latents.vae import tiny_vae

        model = tiny_vae()
    model.decoder = None
    return model.eval()


def main() -> None:
    """Run the loop that the command line selects."""
    kind, *words = sys.argv[1:]
    if kind == "latents":
        data, vae, size, fps, batch, out = words
        latents(Path(data), vae, size=int(size), fps=Fraction(fps), batch=int(batch), out=Path(out))
    else:
        data, weights, batch, out = words
        text(Path(data), Path(weights), batch=int(batch), out=Path(out))


if __name__ == "__main__":
    main()
