"""Results on other data than the run's have different names, regardless of how a path or URL is spelled."""

import re
from pathlib import Path

import pytest

from clipmill.train.run.folder import data_facts, other_data, result_name


def test_another_spelling_of_the_run_s_own_data_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    for shards in (None, "data", "./data/", "link", str(tmp_path / "data")):
        facts = data_facts("data", shards)
        assert facts == {"shards": str(tmp_path / "data"), "is_own_data": True}
        assert result_name("probe-val", facts) == "probe-val" and other_data(facts) == ""
    assert data_facts("s3://bucket/data", "s3://bucket/data/")["is_own_data"]


def test_each_other_folder_has_a_name_of_its_own_that_is_a_file_name(tmp_path: Path) -> None:
    others = [*(str(tmp_path / name) for name in ("a/x", "b/x", "c/ü {0..9}/../<y>")), "s3://bucket/x", "/", "l" * 300]
    names = [result_name("probe-val", data_facts("data", shards)) for shards in others]
    assert len(set(names)) == len(names) and names[0].startswith("probe-val-x-")
    assert all(re.fullmatch(r"[\w.-]{1,100}", name) for name in names)
    assert other_data(data_facts("data", "s3://bucket/x")) == "s3://bucket/x"


def test_a_result_that_does_not_say_is_the_run_s_own() -> None:
    assert other_data({"evaluation": "probe"}) == ""
