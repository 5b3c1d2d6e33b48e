from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.shards.dataset import (
    DamagedDataset,
    begin_variant,
    current_variant,
    list_variants,
    set_current_variant,
    unfinished_variant,
    variant_dir,
)


def test_each_column_has_its_own_current_variant(tmp_path: Path) -> None:
    assert current_variant(tmp_path, "video") is None
    set_current_variant(tmp_path, "video", "h264-11111111")
    set_current_variant(tmp_path, "text", "clip-22222222")
    set_current_variant(tmp_path, "video", "hevc-33333333")
    assert current_variant(tmp_path, "video") == "hevc-33333333"
    assert current_variant(tmp_path, "text") == "clip-22222222"
    assert current_variant(tmp_path, "latents") is None


def test_setting_the_same_variant_again_writes_nothing(tmp_path: Path) -> None:
    set_current_variant(tmp_path, "video", "h264-11111111")
    (tmp_path / "dataset.json").chmod(0o400)
    before = (tmp_path / "dataset.json").stat()
    set_current_variant(tmp_path, "video", "h264-11111111")
    after = (tmp_path / "dataset.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_variants_on_the_disk_are_listed(tmp_path: Path) -> None:
    assert list_variants(tmp_path, "video") == []
    for name in ("b-22222222", "a-11111111", ".tmp-x"):
        variant_dir(tmp_path, "video", "x").parent.joinpath(name).mkdir(parents=True)
    (tmp_path / "video" / "notes.txt").write_text("")
    assert list_variants(tmp_path, "video") == ["a-11111111", "b-22222222"]


@pytest.mark.parametrize("name", ["", ".", "..", "../elsewhere", "/etc", "a/b", ".tmp-1"])
def test_a_variant_is_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="not a valid column or variant name"):
        variant_dir(tmp_path, "video", name)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"columns": 3}', '{"columns": {"video": "x"}}', '{"clipmill_format": 9, "columns": {}}'],
)
def test_a_dataset_file_of_another_kind_is_a_users_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(UserError, match=r"dataset\.json") as raised:
        current_variant(tmp_path, "video")
    assert raised.value.hint


def damage(data: Path) -> None:
    path = data / "dataset.json"
    path.write_text(path.read_text().replace("11111111", "11111110"))


def test_a_changed_name_is_refused(tmp_path: Path) -> None:
    set_current_variant(tmp_path, "video", "h264-11111111")
    damage(tmp_path)
    with pytest.raises(DamagedDataset, match="checksum") as raised:
        current_variant(tmp_path, "video")
    assert "prep chunk" in str(raised.value.hint)


def test_a_damaged_file_is_written_again_where_the_folders_tell_what_it_said(tmp_path: Path) -> None:
    for column, name in (("video", "h264-11111111"), ("latents", "vae-22222222")):
        variant_dir(tmp_path, column, name).mkdir(parents=True)
        set_current_variant(tmp_path, column, name)
    before = (tmp_path / "dataset.json").read_bytes()
    damage(tmp_path)
    begin_variant(tmp_path, "video", "h264-11111111")
    assert (tmp_path / "dataset.json").read_bytes() == before
    variant_dir(tmp_path, "latents", "other-44444444").mkdir()
    damage(tmp_path)
    with pytest.raises(DamagedDataset):
        begin_variant(tmp_path, "video", "h264-11111111")


def test_the_variant_of_an_unfinished_run_is_known_until_a_run_of_the_column_has_ended(tmp_path: Path) -> None:
    begin_variant(tmp_path, "video", "h264-11111111")
    first = (tmp_path / "dataset.json").read_bytes()
    assert (current_variant(tmp_path, "video"), unfinished_variant(tmp_path, "video")) == ("h264-11111111", None)
    for end in (begin_variant, set_current_variant):  # a run that returns to the current variant, and the end of a run
        begin_variant(tmp_path, "video", "h264-33333333")
        assert current_variant(tmp_path, "video") == "h264-11111111"
        assert unfinished_variant(tmp_path, "video") == "h264-33333333"
        end(tmp_path, "video", "h264-11111111")
        assert (tmp_path / "dataset.json").read_bytes() == first


def test_a_file_without_checksum_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text('{"clipmill_format": 2, "columns": {"video": {"current": "old"}}}')
    with pytest.raises(UserError, match=r"dataset\.json .*it has no checksum") as caught:
        current_variant(tmp_path, "video")
    assert caught.value.hint
