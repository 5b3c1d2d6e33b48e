"""Forward and backward passes of VideoMAE-B, TimeSformer-B and the text tower, compared with other libraries."""

from functools import partial

import torch
from torch import nn

from benchmarks.caption import CHECKPOINTED, encoder_variants
from benchmarks.caption import HF as CAPTION_HF
from benchmarks.caption import OURS as CAPTION_OURS
from benchmarks.caption_steps import Shape
from benchmarks.gpu.captioners import open_captioners, shape_of
from benchmarks.gpu.implementations import Implementation, Opening, Timings, faster_than, rows_of, take_turns
from benchmarks.gpu.measurements import Result, Setup, Target
from benchmarks.mae_steps import HF, NUM_FRAMES, OURS, HfSteps, OurSteps, Steps, take
from benchmarks.text_tower import SETS, captions, check_equal, text_towers
from benchmarks.text_tower import take as take_text
from clipmill.train.models.attention import open_attention

_CLOSE = 1e-3  # tolerance of the losses in bfloat16
_CLIPS, _TIMESFORMER_CLIPS, _CAPTIONS = 32, 16, 256
PACKED, PADDED, OPEN_CLIP, SHORT = "packed", "padded", "open_clip", "12 tokens"


def measure_videomae(setup: Setup) -> Result:
    """Compare VideoMAE pre-training with VideoMAEForPreTraining and SDPA, on the same weights, clips and masks."""
    device = setup.device
    image_px, batch = (32, 1) if setup.is_dry_run else (224, _CLIPS)
    ours = OurSteps(
        "tiny" if setup.is_dry_run else "b16",
        image_px=image_px,
        decoder_depth=1 if setup.is_dry_run else 4,
        device=device,
    )
    variants: dict[str, Steps] = {OURS: ours, HF: HfSteps(ours.model, device=device)}
    clips = torch.randn(batch, 3, NUM_FRAMES, image_px, image_px, device=device)
    masks = ours.masks(batch, device=device)
    losses = {name: take(steps, clips, masks) for name, steps in variants.items()}
    if abs(losses[OURS] - losses[HF]) > _CLOSE * losses[HF]:
        raise RuntimeError(f"the losses with the same weights differ: {losses}")
    _forget_gradients(*(steps.model for steps in variants.values()))
    openings: dict[str, Opening] = {
        name: lambda steps=steps: Implementation(step=partial(take, steps, clips, masks), model=steps.model)  # type: ignore[misc]
        for name, steps in variants.items()
    }
    taken = take_turns(openings, setup)
    return Result(
        rows=rows_of(taken, setup, items=batch, unit="clips", beside=[HF]),
        notes=[
            f"{batch} clips of {NUM_FRAMES} frames of {image_px} px, 90 % of the cubes masked, targets included, no "
            "optimizer. Both wait for each loss. `peak GiB` excludes weights and clips.",
        ],
        targets=_targets(taken, OURS, HF, speed=1.0, memory=1.0),
    )


def measure_timesformer(setup: Setup) -> Result:
    """Compare TimeSformer with TimesformerModel, on the same weights and clips."""
    shape: Shape = shape_of(setup)
    batch = 1 if setup.is_dry_run else _TIMESFORMER_CLIPS
    ours, theirs = open_captioners(setup)
    clips = torch.randn(batch, 3, shape.num_frames, shape.image_px, shape.image_px, device=setup.device)
    models: dict[str, nn.Module] = {
        CAPTION_OURS: ours.video,
        CHECKPOINTED: ours.video,
        CAPTION_HF: theirs.encoder,
    }
    variants = encoder_variants(ours, theirs, clips)
    _forget_gradients(*models.values())
    openings: dict[str, Opening] = {
        name: lambda name=name, work=work: Implementation(step=work, model=models[name])  # type: ignore[misc]
        for name, work in variants.items()
    }
    taken = take_turns(openings, setup)
    _forget_gradients(*models.values())
    return Result(
        rows=rows_of(taken, setup, items=batch, unit="clips", beside=[CAPTION_HF]),
        notes=[
            f"{batch} clips of {shape.num_frames} frames of {shape.image_px} px, no optimizer. transformers computes "
            "attention eagerly here, because its TimesformerModel has no SDPA. `peak GiB` excludes weights and clips.",
        ],
        targets=_targets(taken, CAPTION_OURS, CAPTION_HF, speed=1.5, memory=0.7),
    )


def measure_text(setup: Setup) -> Result:
    """Compare the packed text tower, the padded text tower and open_clip's on captions of different lengths."""
    device = setup.device
    num_captions = 4 if setup.is_dry_run else _CAPTIONS
    attention = open_attention("auto", device_type=device.type)
    towers = text_towers("tiny" if setup.is_dry_run else "b16", attend=attention.attend, device=device)
    rows, targets = [], []
    for name, lengths_of in SETS.items():
        if setup.is_dry_run and name != SHORT:
            continue
        tokens = captions(lengths_of(num_captions)).to(device)
        check_equal(towers, tokens)
        taken = take_turns({variant: partial(_text_variant, tower, tokens) for variant, tower in towers.items()}, setup)
        of_set = rows_of(taken, setup, items=num_captions, unit="captions", beside=[PADDED, OPEN_CLIP])
        rows += [{"captions": name, **row} for row in of_set]
        if name == SHORT:
            figure = faster_than(taken, PACKED, PADDED)
            targets.append(Target(what="speed of packed / padded, captions of 12 tokens", figure=figure, goal=3.0))
    notes = [
        f"{num_captions} captions per pass, no optimizer; attention: {attention.name}. FLOPs are counted for "
        "the tokens that a variant computes, including padding.",
    ]
    if setup.is_dry_run:
        notes.append("open_clip is not compared in a dry run: it has no tiny text tower.")
    return Result(rows=rows, notes=notes, targets=targets)


def _text_variant(tower: nn.Module, tokens: torch.Tensor) -> Implementation:
    return Implementation(step=partial(take_text, tower, tokens), model=tower)


def _forget_gradients(*models: nn.Module) -> None:
    """Clear the gradients, so that their memory is attributed to the variant that computes them."""
    for model in models:
        model.zero_grad(set_to_none=True)


def _targets(taken: dict[str, Timings], ours: str, theirs: str, *, speed: float, memory: float) -> list[Target]:
    peaks = [taken[name].peak_bytes for name in (ours, theirs)]
    ratio = peaks[0] / peaks[1] if peaks[0] is not None and peaks[1] else None
    return [
        Target(what=f"over {theirs}, speed", figure=faster_than(taken, ours, theirs), goal=speed),
        Target(what=f"over {theirs}, memory", figure=ratio, goal=memory, is_at_most=True),
    ]
