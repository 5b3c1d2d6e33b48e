"""Files that are not weights, are incomplete, or would run code: each error says what the file is."""

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from clipmill.manifests.errors import UserError
from clipmill.train.weights.files import openai_digests, read_tensors

STATE = {"visual.proj": torch.ones(64, 24), "ln_final.weight": torch.arange(48.0)}


class Program:
    """Malicious pickle content that calls a program."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def save_bytes(state: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


def error_and_hint(path: Path, content: bytes) -> tuple[str, str]:
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_tensors(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value), str(caught.value.hint)


@pytest.mark.parametrize("part", [0.05, 0.5, 0.98])
def test_a_file_that_is_cut_is_damaged(tmp_path: Path, part: float) -> None:
    save_file(STATE, tmp_path / "whole.safetensors")
    whole = {"w.pt": save_bytes(STATE), "w.safetensors": (tmp_path / "whole.safetensors").read_bytes()}
    for name, content in whole.items():
        error, hint = error_and_hint(tmp_path / name, content[: int(part * len(content))])
        assert "damaged or truncated" in error or "not a tensor file" in error
        assert hint


@pytest.mark.parametrize(
    "page", [b"<!DOCTYPE html><html>404</html>", b"\n  <html><body>Too many requests", b"<?xml ?>"]
)
@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_an_error_page_is_said_to_be_one(tmp_path: Path, page: bytes, name: str) -> None:
    error, hint = error_and_hint(tmp_path / name, page)
    assert "is a web page, not a weights file" in error and "again" in hint


def test_a_pointer_of_git_lfs_is_said_to_be_one(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 34\n"
    assert "git lfs pull" in error_and_hint(tmp_path / "model.safetensors", pointer)[1]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, is_new: bool) -> None:
    mark = tmp_path / "it-ran"
    program = Program(f"touch {mark}")
    content = save_bytes({**STATE, "payload": program}, _use_new_zipfile_serialization=is_new)
    error, hint = error_and_hint(tmp_path / "w.pt", content)
    assert "posix.system" in error and "only tensors and plain values" in error and "trust" in hint
    assert not mark.exists()
    bare = pickle.dumps(program)
    error_and_hint(tmp_path / "bare.pt", bare)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors", "w"])
def test_what_is_empty_or_text_is_said_to_be_so(tmp_path: Path, name: str) -> None:
    assert f"{name} is empty" in error_and_hint(tmp_path / name, b"")[0]
    # The check reads 512 bytes, which end within a character.
    for text in (b"hello", b'{"model_type": "clip"}\n', b"model: tiny\n" * 100, b"x" + "ü".encode() * 400):
        assert "is a text file, not a safetensors or torch file" in error_and_hint(tmp_path / name, text)[0]


@pytest.mark.parametrize("content", [b"\x00" * 5000, b"PK\x03\x04 not a zip", b"\x80\x02 cut"])
def test_other_bytes_are_no_weights(tmp_path: Path, content: bytes) -> None:
    for name in ("w.pt", "w.safetensors"):
        error, _ = error_and_hint(tmp_path / name, content)
        assert "there are no tensors" not in error, "the contents of the file are unknown"


@pytest.mark.parametrize("state", [{}, {"epoch": 3}, [1, 2], {"state_dict": {"a": 1}}])
def test_a_file_without_tensors_is_said_to_have_none(tmp_path: Path, state: object) -> None:
    assert "there are no tensors" in error_and_hint(tmp_path / "w.pt", save_bytes(state))[0]


def test_what_is_not_there_or_a_folder_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.pt", tmp_path):
        with pytest.raises(UserError, match="cannot read the weights"):
            read_tensors(path)


class TorchScript(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def test_a_pipe_or_a_device_is_no_file_of_weights(tmp_path: Path) -> None:
    """Opening the pipe would block until a writer opens it, and the device has no end."""
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "device.pt").symlink_to("/dev/zero")
    for name in ("pipe.pt", "device.pt"):
        with pytest.raises(UserError, match=f"{name}: not a regular file"):
            read_tensors(tmp_path / name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_program_of_torchscript_is_opened_only_if_openai_published_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    path = tmp_path / "ViT-B-16.pt"
    torch.jit.script(TorchScript()).save(path)
    assert zipfile.is_zipfile(path)
    with pytest.raises(UserError, match=r"OpenAI did not publish this TorchScript program"):
        read_tensors(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr("clipmill.train.weights.files.openai_digests", lambda: frozenset({digest}))
    assert torch.equal(read_tensors(path)["weight"], torch.arange(3.0))


def test_a_program_of_torch_export_is_not_said_to_be_damaged(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(TorchScript(), (torch.zeros(3),)), tmp_path / "model.pt2")
    with pytest.raises(UserError, match=r"model\.pt2 is a torch\.export program, not a weights file"):
        read_tensors(tmp_path / "model.pt2")


def test_openais_digests_are_those_of_its_archives() -> None:
    digests = openai_digests()
    # ViT-B/16: the digest is part of the URL from which OpenAI's code downloads the file.
    assert "5806e77cd80f8b59890b7e101eabd078d9fb84e6937f9e85e4ecb61988df416f" in digests
    assert all(len(digest) == 64 and set(digest) <= set("0123456789abcdef") for digest in digests)
