"""Tests that a path that is not a data folder is rejected with a hint that matches its content."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.shards.dataset import set_current_variant, variant_dir
from clipmill.shards.reader import Variant


def refusal(place: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        Variant.open(place)
    return caught.value


def files(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("make", "what", "hint"),
    [
        (lambda root: files(root / "a", "v.mp4"), "no manifest", "prep manifest folder {root}/a --data DATA"),
        (lambda root: files(root / "a", "000.tar", "001.tar", "002.tar"), "no manifest", "'{root}/a/{{000..002}}.tar'"),
        (lambda root: files(root / "a", "s-08.tar", "s-09.tar", "s-10.tar"), "", "'{root}/a/s-{{08..10}}.tar'"),
        (lambda root: files(root / "a", "000.tar", "002.tar"), "", "'{root}/a/{{000,002}}.tar'"),
        (lambda root: files(root / "a", "cats.tar", "dogs.tar"), "", "'{root}/a/{{cats,dogs}}.tar'"),
        (lambda root: files(root / "a", "cats.tar"), "", "its 1 tar, pass it as '{root}/a/cats.tar'"),
        (lambda root: files(root, "cats.tar.gz") / "cats.tar.gz", "cats.tar.gz is a file", "decompress it"),
        (lambda root: files(root, "v.mp4") / "v.mp4", "v.mp4 is a file", "prep manifest folder {root} --data DATA"),
        (lambda root: files(root / "data/manifest").parent.parent, "no manifest", "such as {root}/data"),
        (
            lambda root: files(files(root / "data/manifest").parent / "video/x", "000.tar"),
            "no manifest",
            "use {root}/data, the data folder that contains it",
        ),
    ],
)
def test_a_hint_fits_what_is_there(tmp_path: Path, make: Callable[[Path], Path], what: str, hint: str) -> None:
    error = refusal(make(tmp_path))
    assert what in str(error) and hint.format(root=tmp_path) in str(error.hint)


def test_a_missing_dataset_file_is_not_called_missing_shards(tmp_path: Path) -> None:
    (tmp_path / "manifest").mkdir()
    assert "has no video shards" in str(refusal(tmp_path))
    set_current_variant(tmp_path, "video", "h264-11111111")
    variant_dir(tmp_path, "video", "h264-11111111").mkdir(parents=True)
    (tmp_path / "dataset.json").unlink()
    error = refusal(tmp_path)
    assert "dataset.json is missing" in str(error) and "h264-11111111" in str(error.hint)
    (tmp_path / "dataset.json").write_text("{")
    assert "dataset.json is damaged" in str(refusal(tmp_path))
