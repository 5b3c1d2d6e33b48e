"""Malicious settings, weight and checkpoint files."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

Damage = Callable[[Path, Path], object]  # (the file or folder, a file that must not be created)

_ALIASES = "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9) if n else '1'}]\n" for n in range(9))
CONFIGS: dict[str, str | bytes] = {
    "list": "- 1\n",
    "text": "just words\n",
    "empty": "",
    "null": "null\n",
    "two": "seed: 3\n---\nsteps: 4\n",
    "object": "!!python/object/apply:os.getcwd []\n",
    "object-inside": "seed: !!python/object/apply:os.system ['true']\n",
    "name": "seed: !!python/name:os.system\n",
    "unknown": "stepz: 3\n",
    "aliases": _ALIASES + "seed: *x8\n",
    "recursive": "seed: &a [*a]\n",
    "recursive-mapping": "loss: &a\n  kind: *a\n",
    "nested": "seed: " + "[" * 20_000 + "\n",
    "nested-closed": "seed: " + "[" * 3000 + "]" * 3000 + "\n",
    "nested-keys": "seed: " + "{a: " * 3000 + "1" + "}" * 3000 + "\n",
    "digits": "seed: " + "9" * 10_000 + "\n",
    "float": "seed: 1.5\n",
    "infinite": "lr: .inf\n",
    "nan": "lr: .nan\n",
    "negative": "seed: -3\n",
    "date": "seed: 2024-13-45\n",
    "sexagesimal": "seed: 190:20:30:99:99\n",
    "binary": "seed: !!binary x\n",
    "set": "seed: !!set {1, 2}\n",
    "merge": "<<: 5\nseed: 3\n",
    "unhashable": "? [1, 2]\n: 3\n",
    "tab": "seed:\t3\n\tlr: 1\n",
    "nul": b"seed: 3\0\n",
    "latin": b"seed: \xff\xfe\n",
    "utf16": "seed: x\n".encode("utf-16"),
    "noise": bytes(range(256)) * 20,
    "long": "seed: " + "x" * 1_000_000 + "\n",
    "keys": "".join(f"k{number}: 1\n" for number in range(20_000)),
    "terminal": 'seed: "\\e[2J\\e]0;x\\a"\n',
}


class _Trap:
    """Object that creates a file when it is unpickled."""

    def __init__(self, sprung: Path) -> None:
        self._sprung = sprung

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._sprung),)


def _safetensors(header: object, body: bytes = bytes(64), *, length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + body


def _tensor(shape: list[int], begin: int, end: int, kind: str = "F32") -> dict[str, object]:
    return {"visual.proj": {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}}


def _save(content: object) -> bytes:
    target = io.BytesIO()
    torch.save(content, target)
    return target.getvalue()


def _zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(1 << 28))
        archive.writestr("x/version", "3")


def _raw(content: bytes) -> Damage:
    return lambda path, _: path.with_suffix("").write_bytes(content)


WEIGHTS: dict[str, Damage] = {
    "pickle": lambda path, sprung: path.write_bytes(pickle.dumps(_Trap(sprung))),
    "pickle-old": lambda path, sprung: path.write_bytes(pickle.dumps(_Trap(sprung), protocol=0)),
    "saved-trap": lambda path, sprung: path.write_bytes(_save({"visual.proj": _Trap(sprung)})),
    "saved-inner-trap": lambda path, sprung: path.write_bytes(_save({"state_dict": {"x": _Trap(sprung)}})),
    "zip-bomb": lambda path, _: _zip_bomb(path),
    "saved-numbers": _raw(_save({"state_dict": 5})),
    "saved-list": _raw(_save([torch.zeros(3)])),
    "saved-others": _raw(_save({"state_dict": {"nothing.of.this": torch.zeros(3)}})),
    "saved-shapes": _raw(_save({"visual.proj": torch.zeros(3), "logit_scale": torch.zeros(())})),
    "saved-cut": _raw(_save({"visual.proj": torch.zeros(300)})[:700]),
    "safetensors-length": _raw(_safetensors({}, length=1 << 60)),
    "safetensors-negative": _raw(_safetensors(_tensor([4], -16, 0))),
    "safetensors-beyond": _raw(_safetensors(_tensor([1 << 40], 0, 1 << 42))),
    "safetensors-shape": _raw(_safetensors(_tensor([1 << 62, 4], 0, 64))),
    "safetensors-type": _raw(_safetensors(_tensor([16], 0, 64, "X99"))),
    "safetensors-nested": _raw(_safetensors(b"[" * 50_000)),
    "safetensors-cut": _raw(_safetensors(_tensor([16], 0, 64), body=b"")),
    "empty": _raw(b""),
    "noise": _raw(bytes(range(256)) * 50),
    "text": _raw(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
    "pipe": lambda path, _: os.mkfifo(path),
    "loop": lambda path, _: path.symlink_to(path),
    "device": lambda path, _: path.symlink_to("/dev/zero"),
    "folder": lambda path, _: path.mkdir(),
}


def _in_record(content: bytes) -> Damage:
    return lambda checkpoint, _: (checkpoint / "checkpoint.json").write_bytes(content)


def _change(key: str, value: object) -> Damage:
    def damage(checkpoint: Path, _: Path) -> None:
        path = checkpoint / "checkpoint.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), key: value}))

    return damage


def _in_each(content: Callable[[Path], bytes]) -> Damage:
    """Replace the content of every other file of the checkpoint."""

    def damage(checkpoint: Path, sprung: Path) -> None:
        for path in sorted(checkpoint.rglob("*")):
            if path.is_file() and path.name != "checkpoint.json":
                path.write_bytes(content(sprung))

    return damage


def _pipes(checkpoint: Path, _: Path) -> None:
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != "checkpoint.json":
            path.unlink()
            os.mkfifo(path)


def _links(checkpoint: Path, _: Path) -> None:
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != "checkpoint.json":
            path.unlink()
            path.symlink_to(checkpoint.parents[2] / "outside")


CHECKPOINTS: dict[str, Damage] = {
    "nested": _in_record(b"[" * 100_000),
    "many": _in_record(b"[" + b"[]," * 500_000 + b"[]]"),
    "digits": _in_record(b'{"step": ' + b"9" * 100_000 + b"}"),
    "list": _in_record(b"[]"),
    "empty": _in_record(b""),
    "nul": _in_record(bytes(1000)),
    "bytes": _in_record(b"\xff\xfe{}"),
    "step-text": _change("step", "x"),
    "step-huge": _change("step", 10**30),
    "step-negative": _change("step", -1),
    "files-number": _change("files", 5),
    "files-outside": _change("files", {"../../../outside": {"size_bytes": 11, "sha256": "00"}}),
    "files-absolute": _change("files", {"/etc/passwd": {"size_bytes": 11, "sha256": "00"}}),
    "pickles": _in_each(lambda sprung: pickle.dumps(_Trap(sprung))),
    "saved-traps": _in_each(lambda sprung: _save({"x": _Trap(sprung)})),
    "empty-files": _in_each(lambda _: b""),
    "pipes": _pipes,
    "links": _links,
}
