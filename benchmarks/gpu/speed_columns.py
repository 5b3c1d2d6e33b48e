"""Encode latents and text as `prep latents` and `prep text` do, compared with plain loops with the same weights."""

from copy import deepcopy
from functools import partial

import numpy as np
import torch

from benchmarks.encoding import CLIP, TEXTS, make_vae, words_of
from benchmarks.gpu.implementations import Implementation, Opening, faster_than, rows_of, take_turns
from benchmarks.gpu.measurements import Result, Setup, Target
from benchmarks.plain_loops import encode_pictures, encode_texts
from clipmill.prep.latents.recipe import Encoding, LatentsSettings, Precision
from clipmill.prep.latents.vae import Encoder, tiny_vae
from clipmill.prep.latents.weights import Vae
from clipmill.prep.text.tower import TINY, TINY_SHA256, Tower, load_tower
from clipmill.train.engine.metrics import FlopCounter

PREP, PLAIN, MODEL = "prep", "plain loop", "the model alone"
_SCALING = 0.18215  # scaling factor of Stable Diffusion's latents
_SIDE_PX, _SIZE_PX, _FRAMES = 288, 256, 32
_TEXTS, _TEXT_BATCH = 1024, 256
_HALVES: tuple[tuple[Precision, str], ...] = (("float16", "fp16"), ("bfloat16", "bf16"))


def measure_latents(setup: Setup) -> Result:
    """Measure the path from frames to latents, both in host memory, with resizing and encoding on the device."""
    side_px, size_px, num_frames = (40, 32, 2) if setup.is_dry_run else (_SIDE_PX, _SIZE_PX, _FRAMES)
    vae = Vae("made", "made", None, "", channels=4, factor=8, scaling_factor=_SCALING, shift_factor=None)
    pictures = np.random.default_rng(0).integers(0, 256, (num_frames, side_px, side_px, 3), np.uint8)
    kind = setup.device.type
    rows, targets = [], []
    precisions: tuple[tuple[Precision, str], ...] = (("float32", "fp32"),) if setup.is_dry_run else _HALVES
    for precision, short in precisions:
        made = tiny_vae() if setup.is_dry_run else make_vae()
        made.register_to_config(scaling_factor=_SCALING)
        settings = LatentsSettings(vae="made", size=size_px, precision=precision)
        encoder = Encoder(made, Encoding(settings, vae), device=kind)  # type: ignore[arg-type]
        plain = deepcopy(made)
        resized = _resized(torch.from_numpy(pictures), size_px=size_px).to(setup.device)
        inputs = resized.to(made.dtype) / 127.5 - 1
        with torch.inference_mode(), FlopCounter() as counter:
            made.encode(inputs)
        whole = resized.round().byte()
        found = encoder.encode([whole], noise=None), encode_pictures(plain, whole)
        furthest = float(np.abs(found[0] - found[1].astype(np.float32)).max())

        def by_prep(encoder: Encoder = encoder) -> None:
            encoder.encode([encoder.resize(pictures, size=size_px)], noise=None)

        def by_loop(model: torch.nn.Module = plain) -> None:
            encode_pictures(model, _resized(torch.from_numpy(pictures).to(setup.device), size_px=size_px))

        def by_model(model: torch.nn.Module = plain, inputs: torch.Tensor = inputs) -> None:
            with torch.inference_mode():
                model.encode(inputs)  # type: ignore[operator]

        openings: dict[str, Opening] = {
            name: partial(Implementation, step=work, num_flops=counter.num_flops)
            for name, work in ((PREP, by_prep), (PLAIN, by_loop), (MODEL, by_model))
        }
        taken = take_turns(openings, setup, num_steps=3)
        of_precision = rows_of(taken, setup, items=num_frames, unit="frames", beside=[PLAIN, MODEL], precision=short)
        rows += [{"precision": short, **row, "furthest apart": furthest} for row in of_precision]
        targets.append(
            Target(
                what=f"{short}: frames/s relative to a plain loop", figure=faster_than(taken, PREP, PLAIN), goal=0.95
            )
        )
    return Result(
        rows=rows,
        notes=[
            f"Stable Diffusion's VAE (84 M parameters, random weights), {num_frames} frames of {side_px} px resized to "
            f"{size_px} px per step, without decoding. `furthest apart`: largest difference between latents of prep "
            "and the loop. FLOPs are counted for a forward pass.",
        ],
        targets=targets,
    )


def _resized(pictures: torch.Tensor, *, size_px: int) -> torch.Tensor:
    """Resize frames [N, S, S, 3] to float32 [N, 3, size, size], as a plain loop does."""
    square = pictures.permute(0, 3, 1, 2).float()
    return torch.nn.functional.interpolate(square, size=(size_px, size_px), mode="bilinear", antialias=True)


def measure_texts(setup: Setup) -> Result:
    """Measure the path from texts to embeddings in host memory, including tokenisation."""
    import open_clip

    kind = setup.device.type
    if setup.is_dry_run:
        tower = load_tower(TINY, sha256=TINY_SHA256, device=kind)
        model, tokenize = tower._model, open_clip.SimpleTokenizer()
    else:
        torch.manual_seed(0)
        model, tokenize = open_clip.create_model(CLIP), open_clip.get_tokenizer(CLIP)
        tower = Tower(model, tokenize, device=kind)
    rng = np.random.default_rng(0)
    batch = 2 if setup.is_dry_run else _TEXT_BATCH
    rows, targets = [], []
    for what, lengths, _ in TEXTS.values():
        texts = [words_of(rng, lengths) for _ in range(batch * 2 if setup.is_dry_run else _TEXTS)]
        with FlopCounter() as counter:
            tower.encode(texts, batch=batch)

        def by_prep(texts: list[str] = texts) -> None:
            tower.encode(texts, batch=batch)

        def by_loop(texts: list[str] = texts) -> None:
            for begin in range(0, len(texts), batch):
                encode_texts(model, tokenize, texts[begin : begin + batch], device=kind)

        openings: dict[str, Opening] = {
            PREP: partial(Implementation, step=by_prep, num_flops=counter.num_flops),
            PLAIN: partial(Implementation, step=by_loop, num_flops=counter.num_flops),
        }
        taken = take_turns(openings, setup, num_rounds=3, num_steps=1)
        of_lengths = rows_of(taken, setup, items=len(texts), unit="texts", beside=[PLAIN], precision="fp32")
        rows += [{"words": what, **row} for row in of_lengths]
        figure = faster_than(taken, PREP, PLAIN)
        targets.append(Target(what=f"{what}: texts/s relative to a plain loop", figure=figure, goal=0.95))
    return Result(
        rows=rows,
        notes=[f"{CLIP}'s text tower with random weights, float32, batch size {batch}. FLOPs are counted for prep."],
        targets=targets,
    )
