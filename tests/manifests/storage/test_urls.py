"""Tests of URLs of objects: their parts, and the parts that are shown."""

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.urls import folder_of, join_url, location_name, mask_secrets, parse_location, split_url


@pytest.mark.parametrize(
    ("url", "root", "key"),
    [
        ("s3://bucket/videos/a b.mp4", "s3://bucket", "videos/a b.mp4"),
        ("s3://bucket/100%25?#.mp4", "s3://bucket", "100%25?#.mp4"),  # every character is part of a key
        ("https://host:8080/videos/a%20b.mp4", "https://host:8080", "videos/a b.mp4"),
        ("http://host", "http://host", ""),
    ],
)
def test_parts_of_a_url(url: str, root: str, key: str) -> None:
    assert split_url(url) == (root, key)
    assert join_url(url, "x y.mp4") == f"{url}/{'x%20y' if url.startswith('http') else 'x y'}.mp4"


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hunter2@bucket/a.mp4",
        "https://me:hunter2@host/a.mp4",
        "https://hunter2@host/a.mp4",
        "https://host/a.mp4?X-Amz-Credential=me&X-Amz-Signature=hunter2",
        "https://host/a.mp4#hunter2",
    ],
)
def test_secrets_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UserError) as caught:
        split_url(url)
    assert "hunter2" not in f"{caught.value} {caught.value.hint}"
    text = f"cannot read {url}: the server said no"
    assert mask_secrets(text).startswith("cannot read ") and "hunter2" not in mask_secrets(text)
    assert "a.mp4" in mask_secrets(text)


def test_a_text_without_secrets_is_shown_as_it_is() -> None:
    for text in ("s3://bucket/a?b#c.mp4", "https://host/a.mp4, and more?", "me@host is no URL"):
        assert mask_secrets(text) == text


def test_local_paths_stay_paths() -> None:
    path, url = parse_location("videos//a.mp4"), parse_location("s3://bucket//a.mp4")
    assert str(path) == "videos/a.mp4" and url == "s3://bucket//a.mp4"
    assert location_name(path).name == location_name(url).name == "a.mp4"
    assert str(folder_of(path)) == "videos" and folder_of("https://host/lists/train.csv") == "https://host/lists"
