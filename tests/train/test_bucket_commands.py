"""Commands that take a run accept its URL, on a machine without local copies."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.objects import open_objects
from clipmill.train.config.shards import local_folder
from clipmill.train.inference import load_model
from tests.train.running import SMALL, train, two_lines


def test_commands_take_the_address_of_a_run(
    tmp_path: Path,
    data_dir: Path,
    bucket: str,
    other_machine: Callable[[], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    scratch, address = str(other_machine()), f"{bucket}/runs/first"
    words = ("dual-encoder", "--shards", data_dir, *SMALL, "--device", "cpu")
    assert train(*words, "--steps", 1, "--out", address) == 0
    assert f"next: train eval retrieval {address}" in capsys.readouterr().out
    assert train(*words, "--steps", 1, "--out", address) == 2
    assert two_lines(capsys)[0] == f"error: {address} exists already"
    # A record that arrives late, after the parts of its checkpoint were deleted, is not a checkpoint.
    objects = open_objects(address)
    objects.write("checkpoints/step_000009/checkpoint.json", objects.read("checkpoints/step_000001/checkpoint.json"))

    scratch = str(other_machine())
    assert train("eval", "retrieval", address) == 0
    assert f"written: {address}/evaluations/retrieval-val.json" in capsys.readouterr().out
    assert train("embed", address, "--out", tmp_path / "embedded") == 0
    assert train("search", tmp_path / "embedded", "it begins") == 0
    assert train("export", address, "--format", "open_clip", "--out", tmp_path / "exported") == 0
    assert train("overview", address, "--out", tmp_path / "overview.html") == 0
    assert f'href="{address.replace(":", "%3A")}/index.html"' in (tmp_path / "overview.html").read_text()
    assert train(*words, "--steps", 1, "--init.weights", address, "--out", tmp_path / "second") == 0
    assert train("eval", "retrieval", address) == 0  # the same evaluation replaces its result

    local, exported = load_model(address), load_model(tmp_path / "exported")
    assert local.identity == exported.identity and local.description.startswith(f"{address} (step 1)")
    frames = torch.zeros(1, 2, 32, 32, 3, dtype=torch.uint8)
    assert torch.equal(local.encode_video(frames), exported.encode_video(frames))

    keys = [info.key for info in objects.list()]
    assert [key for key in keys if key.startswith("evaluations/")] == ["evaluations/retrieval-val.json"]
    written = [*(objects.read(key) for key in keys if not key.endswith(".bin"))]
    written += [path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".json", ".html", ".md", ".yaml")]
    assert not any(scratch.encode() in content for content in written), "a local path is written in place of the URL"


def test_addresses_without_a_run_are_refused(
    bucket: str, other_machine: Callable[[], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other_machine()
    open_objects(f"{bucket}/exported").write("model.safetensors", b"")
    with pytest.raises(UserError, match=f"there is no run in {bucket}/exported"):
        load_model(f"{bucket}/exported")
    for address, reason in (
        ("s3://no-such-bucket-here/run", "the bucket of s3://no-such-bucket-here/run does not exist"),
        ("https://example.org/run", "cannot be a run"),
        ("ftp://example.org/run", "ftp:// URLs are not supported"),
    ):
        with pytest.raises(UserError, match=reason):
            local_folder(address)
    for mistyped in ("s3:/bucket/run", "s3//bucket/run"):
        capsys.readouterr()
        assert train("mae", "--shards", tmp_path, "--out", mistyped) == 2
        assert two_lines(capsys)[1] == f"hint: use s3://bucket/run for a URL, or ./{mistyped} for a local path"
    assert train("embed", "runs/first", "--out", f"{bucket}/embedded") == 2
