"""Make old_runs.tar.xz: runs of every task, their exports and their numbers, by another version of clipmill.

    git worktree add --detach ../old 893498c
    checkout=$PWD; mkdir ../work && cd ../work
    PYTHONPATH=$checkout/../old OMP_NUM_THREADS=1 $checkout/.venv/bin/python $checkout/tests/train/make_old_runs.py
    mv old_runs.tar.xz $checkout/tests/train/

The script calls that version through its command line alone, with the flags of 893498c. Each run has four steps and is
stored as a kill after step 2 would have left it: one checkpoint, no page.

The smallest model has 7 million parameters, too many for a fixture. The runs therefore start from thinned weights: one
channel of 16, one hidden unit of 64 and two rows of each head are random, the others are zero (the bias of a hidden
unit is -20, where GELU is zero). The gradients of the rest are then zero or equal to each other, so that the checkpoint
of an ordinary training run compresses to less than a hundredth. Clips of pixels are cropped in the centre, where
nothing is resized, except in `infonce`. No run uses random erasing: its noise comes from another generator since then.
"""

import hashlib
import json
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_STEPS, _KILLED_AT = 4, 2
_SCHEDULE = f"--batch 4 --lr 1e-3 --warmup-steps 2 --steps {_STEPS} --checkpoint-every {_KILLED_AT}"
_MODEL = "--shards data --model tiny --workers 1 --device cpu"
_PIXELS = f"{_MODEL} --num-frames 2 --size-px 32"
_CENTRE = f"{_PIXELS} --crop centre"
_LATENTS = f"{_MODEL} --input latents --segment 2s --num-frames 4"
_DECODER = "--decoder.width 8 --decoder.heads 2 --decoder.depth 1 --decoder.max-tokens 12 --decoder.vocabulary 280"
_MASKS = "--decoder-depth 1 --mask-ratio 0.5"
_MAE = f"mae {_LATENTS} {_MASKS}"

DATA = (
    "manifest synthetic --videos 10 --minutes 0.1 --out videos",
    "chunk --len 2s --short-side 32 --fps 10 --engine processes --workers 1",
    "latents --vae tiny --size 32 --engine processes --workers 1",
    "text --clip tiny --engine processes --workers 1",
)
# What the thinned weights are made of: the command of a run of one step, and the format of its export.
STARTS = {
    "clip": (f"dual-encoder {_CENTRE}", "open_clip"),
    "mae": (_MAE, "hf"),
    "captioner": (f"caption {_CENTRE} --decoder.name tiny {_DECODER}", "hf"),
}
RUNS = {
    "infonce": (
        f"dual-encoder {_PIXELS} --init.weights starts/clip --augment.flip 0.5 --augment.hue 0.1 --evaluate.every 2"
    ),
    "fastclip": (
        f"dual-encoder {_CENTRE} --init.weights starts/clip --loss.kind fastclip-v3 --microbatch 2 --augment.flip 0.5"
        " --towers.patch-dropout 0.5 --optimizer.name lion --optimizer.ema 0.5"
    ),
    "latents": (
        f"dual-encoder {_LATENTS} --text-tower frozen --init.weights starts/clip --init.allow visual.conv1.weight"
        " --loss.kind siglip --optimizer.name sgd"
    ),
    "mae": f"{_MAE} --init.weights starts/mae --optimizer.lr-batch 4",
    "classes": (
        f"classify {_CENTRE} --init.weights starts/clip --label shape --optimizer.name lamb --mixup 0.8 --cutmix 1"
        " --label-smoothing 0.1 --augment.rand-ops 4 --repeats 2"
    ),
    "latent-classes": (
        f"classify {_LATENTS} --init.weights starts/mae --label shape --optimizer.layer-decay 0.75"
        " --towers.drop-path 0.1"
    ),
    "captions": (
        f"caption {_CENTRE} --init.weights starts/captioner --decoder.dropout 0.1 --decoding.method sample"
        " --decoding.min-tokens 4 --evaluate.every 2 --evaluate.split train"
    ),
}
EVALUATIONS = {
    "infonce": ("retrieval --split train", "zero-shot --split train --label shape"),
    "fastclip": ("retrieval --split train",),
    "latents": ("retrieval --split train",),
    "mae": ("reconstruction", "probe --label motion"),
    "classes": ("classification --split train --clips 2 --crops 3",),
    "latent-classes": ("classification --split train",),
    "captions": ("caption --split train",),
}
# Run and flags of each export; then the command of a run of one step that starts from it.
EXPORTS = {
    "infonce-open_clip": ("infonce --format open_clip", f"dual-encoder {_CENTRE}"),
    "fastclip-hf": ("fastclip --format hf --frame-embedding zero", f"dual-encoder {_CENTRE}"),
    "mae-hf": ("mae --format hf", _MAE),
    "mae-videomae": ("mae --format videomae", _MAE),
    "latent-classes-hf": ("latent-classes --format hf", f"classify {_LATENTS} --label shape"),
    "latent-classes-videomae": ("latent-classes --format videomae", f"classify {_LATENTS} --label shape"),
    "captions-hf": ("captions --format hf", f"caption {_CENTRE}"),
}
# VideoMAE on pixels: checkpoints of it do not compress. A run of one step starts from the export of another run, at a
# learning rate that changes no weight, and is exported again. All of its weights but a new last layer are a pattern.
PIXELS = {
    "pixels": ("starts/pixels", f"mae {_CENTRE} {_MASKS}"),
    "pixel-classes": ("exports/pixels-hf", f"classify {_CENTRE} --label shape"),
}
PIXEL_FORMATS = ("hf", "videomae")
# Captions of an evaluation, in the folder of a run.
WRITTEN = Path("evaluations", "captions-train.coco.json")
# Too large for the archive, which has their checksums; open_clip's own vocabulary.
VOCABULARY = ("merges.txt", "vocab.json")

_KEPT_OF = {384: 16, 128: 16, 512: 64, 64: 8, 256: 32}  # of an axis of so many every so-manieth
_DEAD_BIASES = ("c_fc.bias", "intermediate.dense.bias")
# The low bits of a position tell which byte of a float it is.
_FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 192 << 20, "lc": 0, "lp": 2, "pb": 2}
]


def start_flags(weights: str, out: str, *, lr: str = "1e-3") -> str:
    """Flags of a run of one step that starts from weights."""
    return f"--batch 4 --lr {lr} --warmup-steps 1 --steps 1 --init.weights {weights} --out {out}"


def arithmetic() -> str:
    """Processor and torch, which decide the order of additions: losses are bit-equal only where they are the same."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = sorted({line for line in lines if re.match(r"(model|flags|cpu family|vendor_id)", line)})
    digest = hashlib.sha256("\n".join(named).encode()).hexdigest()[:12]
    return f"{platform.machine()} {digest} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"


def thin(folder: Path) -> None:
    """Sets nearly all channels of exported weights to zero; the matrices of the others become larger for it."""
    path = _weights_of(folder)
    state = load_file(path)
    for name, tensor in state.items():
        if name.startswith("decoder.transformer."):
            continue  # a GPT-2 that is small enough
        if name == "token_embedding.weight":
            tensor.copy_(tensor[torch.arange(len(tensor)) % 97])
        elif tensor.ndim == 2 and all(size in _KEPT_OF for size in tensor.shape):
            tensor.mul_(2)
        for axis, size in enumerate(tensor.shape):
            if size in _KEPT_OF:
                dead = (torch.arange(size) % _KEPT_OF[size]).nonzero().squeeze(1)
                tensor.index_fill_(axis, dead, -20.0 if name.endswith(_DEAD_BIASES) else 0.0)
    save_file(state, path, {"format": "pt"})
    for extras in folder.glob("*extras*"):
        extras.unlink()


def fill_with_pattern(folder: Path) -> None:
    """Sets exported weights to numbers that repeat, none of them so small that a tiny step would change it."""
    path = _weights_of(folder)
    state = load_file(path)
    for tensor in state.values():
        tensor.view(-1).copy_((torch.arange(tensor.numel()) % 61 - 30.5) / 512)
    save_file(state, path, {"format": "pt"})


def _weights_of(folder: Path) -> Path:
    (path,) = (path for path in folder.glob("*.safetensors") if "extras" not in path.name)
    return path


def call(program: str, words: str, **environment: str) -> str:
    """Runs a command and gives what it printed."""
    print(program, words, flush=True)
    command = [sys.executable, "-m", program, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def kill(run: Path) -> None:
    """Leaves of a run what a kill after step _KILLED_AT would have left."""
    for checkpoint in run.glob("checkpoints/*"):
        if checkpoint.name != f"step_{_KILLED_AT:06d}":
            shutil.rmtree(checkpoint)
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:_KILLED_AT]))
    shutil.rmtree(run / "evaluations", ignore_errors=True)
    (run / "index.html").unlink()


def main() -> None:
    for words in DATA:
        call("prep.cli", f"{words} --data data")
    for name, (words, form) in STARTS.items():
        _seed(name, words, form)
        thin(Path("starts", name))
    _seed("pixels", PIXELS["pixels"][1], "hf")
    fill_with_pattern(Path("starts/pixels"))
    expected: dict[str, Any] = {"arithmetic": arithmetic(), "runs": {}, "exports": {}}
    for name, words in RUNS.items():
        call("train", f"{words} {_SCHEDULE} --out runs/{name}")
        steps = read_lines(Path("runs", name, "metrics.jsonl"))
        kill(Path("runs", name))
        shutil.copytree(f"runs/{name}", f"evaluated/{name}")
        expected["runs"][name] = {"steps": steps, "scores": {one: _score(one, name) for one in EVALUATIONS[name]}}
    for name, (words, start) in EXPORTS.items():
        call("train", f"export runs/{words} --out exports/{name}")
        call("train", f"{start} {start_flags(f'exports/{name}', f'started/{name}')}")
        loss = read_lines(Path("started", name, "metrics.jsonl"))[0]["loss"]
        expected["exports"][name] = {"first_loss": loss, "vocabulary": _checksums(Path("exports", name))}
    for name, (weights, words) in PIXELS.items():
        call("train", f"{words} {start_flags(weights, f'passed/{name}', lr='1e-12')}")
        for form in PIXEL_FORMATS:
            call("train", f"export passed/{name} --format {form} --out exports/{name}-{form}")
    Path("expected.json").write_text(json.dumps(expected, indent=1))
    with lzma.open("old_runs.tar.xz", "wb", filters=_FILTERS) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for top in ("expected.json", "data", "runs", "exports"):
            tar.add(top, filter=_stored)


def _seed(name: str, words: str, form: str) -> None:
    call("train", f"{words} --batch 4 --lr 1e-12 --warmup-steps 1 --steps 1 --out seeds/{name}")
    call("train", f"export seeds/{name} --format {form} --out starts/{name}")


def _score(evaluation: str, name: str) -> dict[str, Any]:
    kind, _, flags = evaluation.partition(" ")
    printed = call("train", f"eval {kind} evaluated/{name} {flags} --json", PATH="")  # no java, and so no METEOR
    score = {key: value for key, value in json.loads(printed).items() if key not in ("command", "shards")}
    captions = Path("evaluated", name, WRITTEN)
    return score | ({"written": json.loads(captions.read_bytes())} if captions.exists() else {})


def _checksums(export: Path) -> dict[str, str]:
    paths = (export / name for name in VOCABULARY)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.exists()}


def _stored(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if Path(member.name).name in VOCABULARY:
        return None
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
