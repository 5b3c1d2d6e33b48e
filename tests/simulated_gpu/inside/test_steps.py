"""Steps of every task: each wait, copy and race on the GPU of a rank, and the losses of a CPU.

The runs have between them what the presets have (test_every_preset_has_its_parts_here).
"""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from clipmill.train.run.checkpoint import all_checkpoints
from tests.simulated_gpu.inside.runs import DECODER, LATENTS, NUM_STEPS, PIXELS, SMALL
from tests.simulated_gpu.inside.steps import LOCAL_RANK, STEADY, run, run_on_cpu, steady
from tests.tiers import nightly_beyond
from tests.train.running import losses

PRESETS = Path(__file__).parents[3] / "train" / "presets"
STORED = f"dual-encoder {LATENTS} --text-tower frozen"
JITTER = "--augment.flip 0.5 --augment.hue 0.1 --augment.contrast 0.2 --augment.blur 0.5"
FINE_TUNING = (
    "--towers.kind videomae --repeats 2 --optimizer.layer-decay 0.75 --mixup 0.8 --cutmix 1 --label-smoothing 0.1"
    " --augment.rand-ops 4 --augment.erase 0.5 --towers.drop-path 0.1"
)
IN_LOOP = "--evaluate.every 3 --evaluate.max-samples 4"
SHORT = "--decoding.max-tokens 4"
LABELS = "--label class"
# Towers of libraries say their own depth.
LIBRARY = f"{SMALL} --size-px 32 --batch 4"
# Each task, tower, loss, optimizer and precision of a preset occurs in one of them. In float32, losses are a CPU's.
HALF, SINGLE = "--precision auto", "--precision fp32"
RUNS = {
    "infonce": f"dual-encoder {PIXELS} {JITTER} {SINGLE} --loss.freeze-temperature --towers.activation-checkpointing"
    " --optimizer.schedule fixed",
    "mbcl, evaluated": f"dual-encoder {PIXELS} {HALF} --loss.kind mbcl --optimizer.ema 0.9 {IN_LOOP}"
    " --evaluate.protocol mir --evaluate.relevancy RELEVANCY",
    "max-margin": f"dual-encoder {PIXELS} {SINGLE} --loss.kind max-margin --towers.drop-path 0.1 --microbatch 2",
    "siglip, frozen": f"dual-encoder {PIXELS} {HALF} --loss.kind siglip --freeze video --towers.no-packed-text",
    "adapters": f"dual-encoder {PIXELS} {SINGLE} --freeze text --lora.rank 2 --towers.patch-dropout 0.5"
    " --init.weights WEIGHTS",
    "divided": f"dual-encoder {PIXELS} --precision fp16 --towers.attention divided",
    "sogclr": f"{STORED} {SINGLE} --loss.kind sogclr --optimizer.name lamb",
    "isogclr": f"{STORED} {SINGLE} --loss.kind isogclr --loss.convention paper --microbatch 2",
    "fastclip-v0": f"{STORED} {SINGLE} --loss.kind fastclip-v0 --optimizer.name sgd",
    "fastclip-v1": f"{STORED} {SINGLE} --loss.kind fastclip-v1 --optimizer.name lion",
    "fastclip-v2": f"{STORED} --precision fp16 --loss.kind fastclip-v2 --optimizer.name lamb",
    "fastclip-v3": f"{STORED} {SINGLE} --loss.kind fastclip-v3 --optimizer.ema 0.9 --microbatch 2",
    "mae": f"mae {PIXELS} {HALF} --mask-ratio 0.75 --decoder-depth 1 --augment.flip 0.5 --decoder-mask running-cell"
    f" --microbatch 2 --crop multi-scale {IN_LOOP} --evaluate.labels class --evaluate.methods knn"
    " --evaluate.neighbours 3",
    "mae, latents": f"mae {LATENTS} {SINGLE} --mask-ratio 0.75 --decoder-depth 1 --decoder-mask random",
    "videomae": f"classify {PIXELS} {SINGLE} {LABELS} {FINE_TUNING}",
    "clip, sgd": f"classify {PIXELS} {HALF} {LABELS} --optimizer.name sgd --dropout 0.5 --towers.drop-path 0.1"
    " --towers.drop-path-rule constant"
    f" {IN_LOOP}",
    "timesformer": f"caption {PIXELS} {DECODER} --captions-per-visit 2 --microbatch 2 --precision fp16 {IN_LOOP}"
    f" --crop centre --decoding.method beam --decoding.num-beams 2 {SHORT}",
    "library, ResNet": f"dual-encoder {LIBRARY} {HALF} --towers.image open_clip:test-RN --towers.text open_clip:test-RN"
    " --loss.kind fastclip-v3 --microbatch 2",
    # Its loss rises from 1.6 to 3.5 at the default rate, which also enlarges differences of rounding.
    "library, SigLIP 2": f"dual-encoder {LIBRARY} {SINGLE} --towers.image open_clip:test-SigLIP2 --lr 1e-4"
    " --towers.text open_clip:test-SigLIP2 --towers.pool-frames attention --optimizer.layer-decay 0.5",
    "library, CLIP and T5": f"dual-encoder {LIBRARY} {SINGLE} --towers.image hf:MODELS/clip --towers.text hf:MODELS/t5"
    " --towers.text-pooling mean --towers.context-length 12 --towers.activation-checkpointing --microbatch 2",
    "library, DINOv2 and BERT": f"dual-encoder {LIBRARY} {HALF} --towers.image hf:MODELS/dinov2 --freeze video"
    " --towers.text hf:MODELS/bert --towers.text-pooling first --optimizer.ema 0.9",
    "library, timm": f"classify {LIBRARY} {HALF} {LABELS} --towers.image timm:tiny_pe --mixup 0.8 --dropout 0.5",
    "language model": f"caption {PIXELS} --decoder.lm MODELS/qwen3 --decoder.visual-tokens 4 --decoder.max-tokens 16"
    f" {SINGLE} --towers.activation-checkpointing --microbatch 2 {IN_LOOP} --decoding.method sample --decoding.top-k 9"
    f" {SHORT}",
    "language model, adapted": f"caption {PIXELS} --decoder.lm MODELS/llama --decoder.visual-tokens 4 {HALF}"
    " --decoder.prompt see{video}say: --decoder.max-tokens 16 --lora.rank 2 --lora.towers decoder"
    " --decoder.reducer attention",
    "captions": f"caption {PIXELS} {DECODER} {SINGLE} --towers.kind timesformer --optimizer.schedule linear {IN_LOOP}"
    f" {SHORT}",
}
# Of each task one, in which its loss, its evaluation or its library differs most from the others.
EVERY_DAY = (
    "mbcl, evaluated",
    "mae",
    "videomae",
    "captions",
)
# transformers reads whether a mask or positions have anything to hide, to choose a kernel for attention, and cannot be
# told: once for each pass of texts through a tower, and of captions through a language model with checkpointing.
OF_TRANSFORMERS = {
    "library, CLIP and T5": ["train/models/hugging_face.py"] * 4,
    "library, DINOv2 and BERT": ["train/models/hugging_face.py"],
    "language model": ["train/tasks/caption/language.py"] * 2,
}


@pytest.fixture
def words(
    name: str, trained_runs: dict[str, Path], models: Path, clips_dir: Path, latents_dir: Path, tmp_path: Path
) -> list[str]:
    """The command line of a run."""
    flags = RUNS[name].replace("WEIGHTS", str(trained_runs["dual-encoder"])).replace("MODELS", str(models))
    if "RELEVANCY" in flags:
        np.save(tmp_path / "relevancy.npy", np.eye(4))
        flags = flags.replace("RELEVANCY", str(tmp_path / "relevancy.npy"))
    shards = latents_dir if "--input latents" in flags else clips_dir
    return [*flags.split(), "--steps", str(NUM_STEPS), "--shards", str(shards)]


@pytest.mark.parametrize("name", nightly_beyond(EVERY_DAY, RUNS))
def test_a_steady_step_waits_for_the_numbers_of_the_step_before_alone(
    name: str, words: list[str], tmp_path: Path
) -> None:
    journal = run(*words, "--out", tmp_path / "run")
    assert journal.races == []
    assert steady(journal.pageable) == []
    waits = [note.where.partition(":")[0] for note in journal.waits if note.step in STEADY]
    assert waits == [*OF_TRANSFORMERS.get(name, ()), "train/device/transfer.py"] * len(STEADY), steady(journal.waits)
    assert journal.devices == {LOCAL_RANK}
    losses_found = losses(tmp_path / "run")
    assert len(losses_found) == NUM_STEPS and all(map(math.isfinite, losses_found))
    if SINGLE in " ".join(words):
        run_on_cpu(*words, "--out", tmp_path / "cpu")
        assert losses_found == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("precision", [pytest.param(SINGLE, marks=pytest.mark.nightly), "--precision fp16"])
def test_a_run_that_goes_on_has_its_state_on_the_gpu_of_its_rank(
    precision: str, latents_dir: Path, tmp_path: Path
) -> None:
    """In fp16, it has the state of a gradient scaler as well."""
    flags = f"{STORED} {precision} --loss.kind fastclip-v3 --optimizer.ema 0.9 --steps 3 --checkpoint-every 2"
    out = tmp_path / "run"
    run(*flags.split(), "--shards", latents_dir, "--out", out, keeps_checkpoints=True)
    expected = losses(out)
    last = max(checkpoints := all_checkpoints(out / "checkpoints"))
    assert sorted(checkpoints) == [2, 3]
    shutil.rmtree(checkpoints[last])
    journal = run("dual-encoder", "--resume", "--out", out, keeps_checkpoints=True)
    assert losses(out) == expected and len(expected) == 3
    assert journal.devices == {LOCAL_RANK} and journal.races == [] and journal.pageable == []


# Settings of presets that choose nothing on the device: numbers, and what the host decides.
_NOTHING_ELSE = {
    "model", "num_frames", "size_px", "min_crop_area", "steps", "batch", "lr", "warmup_steps", "weight_decay",
    "max_grad_norm", "checkpoint_every", "workers", "seed", "best", "sampling", "stride", "samples_per_chunk", "label",
    "segment", "mask_ratio", "decoder_depth", "captions.min_relevancy", "towers.embedding_width", "towers.temporal",
    "decoder.vocabulary", "decoder.max_tokens", "decoding.max_tokens", "evaluate.max_samples", "evaluate.split",
    "augment.rand_magnitude", "augment.rand_std", "loss.margin", "loss.epsilon", "loss.temperature", "loss.gamma",
    "loss.gamma_schedule", "loss.gamma_epochs", "loss.rho", "loss.temperature_lr", "optimizer.start_lr",
    "optimizer.end_lr", "optimizer.lr_batch", "optimizer.beta1", "optimizer.beta2", "optimizer.eps",
    "optimizer.momentum",
}  # fmt: skip


def _settings_of(preset: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting of a preset, those for other losses and optimizers too."""
    for name, value in preset.items():
        if name == "by":
            for setting, cases in value.items():
                for case, values in cases.items():
                    yield from [
                        (setting, case),
                        *_settings_of(
                            {setting_name: values[setting_name] for setting_name in values if setting_name != "source"}
                        ),
                    ]
        elif isinstance(value, dict):
            yield from _settings_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_every_preset_has_its_parts_here() -> None:
    """A preset with another task, tower, loss, optimizer, precision or anything else needs a run of it here."""
    defaults = {"loss.kind": "infonce", "optimizer.name": "adamw", "decoder.name": "gpt2"}
    flags = " ".join(f" {flags} " for flags in RUNS.values())
    for path in PRESETS.glob("*.yaml"):
        missing = []
        for name, value in _settings_of(yaml.safe_load(path.read_text())):
            if name in _NOTHING_ELSE or defaults.get(name) == value:
                continue
            flag = f" --{name.replace('_', '-')} "
            if isinstance(value, str) and name not in ("evaluate.every", "crop"):
                flag += f"{value.partition(':')[0]}{':' if ':' in value else ' '}"
            elif value == "centre" or value == "multi-scale":
                flag += f"{value} "
            missing += [flag] if flag not in flags else []
        assert missing == [], path.name
