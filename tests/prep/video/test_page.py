"""Tests of the page of `prep inspect --html`: its chunks, their clips, several pages, and its content as HTML."""

import html
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from urllib.parse import unquote

import av
import numpy as np
import pyarrow as pa
import pytest

from clipmill.manifests.store import read_videos
from clipmill.prep.core.work import PageRequest
from clipmill.prep.synthetic import read_frame_number
from clipmill.prep.video.page import cards, write
from clipmill.prep.video.page.cards import CaptionLine, Card
from clipmill.prep.video.page.chunks import Chunks, choose_chunks, count_captions, read_chunks
from clipmill.prep.video.page.write import TEMPLATE, write_chunk_page
from clipmill.shards.pages import templates
from clipmill.shards.pages.figures import Histogram, histogram
from clipmill.shards.pages.templates import load_template
from clipmill.shards.reader import Variant
from tests.browser import needs_chromium, show_page
from tests.object_storage.faults import Faults
from tests.object_storage.folders import upload
from tests.prep.running import Ran, identities, prep_here
from tests.prep.sets import NASTY, ShardSet, flip

Prep = Callable[..., Ran]
KEYS = ["long_000000000", "long_000002000", "long_000004000", "short_000000000", "short_000002000"]


class _Page(HTMLParser):
    """Cards with their clips, and the links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.keys: list[str] = []
        self.clips: list[str] = []
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.keys += [attributes["id"]] if tag == "article" else []
        self.clips += [unquote(attributes["src"])] if tag == "video" else []
        self.links += [unquote(attributes["href"])] if tag == "a" else []


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write clips to a folder, however few they are."""
    monkeypatch.setattr(cards, "EMBEDDED_BYTES", 0)


def chunks_of(splits: dict[str, int]) -> Chunks:
    """Return chunks of one video, with the given number for each split."""
    split = np.repeat(np.arange(len(splits), dtype=np.int32), list(splits.values()))
    number = np.arange(len(split))
    return Chunks(
        *(pa.array(["v"]), np.zeros(len(split), np.int32), number * 1000, np.ones(len(split)), number),
        *(tuple(splits), split, np.zeros(len(split), np.int32), number.astype(np.int32), {}),
    )


@pytest.mark.usefixtures("beside")
def test_clips_beside_the_page_are_copies_that_a_rerun_keeps(prep: Prep, shard_set: ShardSet, tmp_path: Path) -> None:
    page = tmp_path / "my chunks.html"
    stdout = prep("inspect", "--html", page, "--data", shard_set.data).stdout
    folder = tmp_path / "my chunks.files"
    assert "5 chunks" in stdout and str(folder) in stdout and page.as_uri() in stdout
    page_read = _Page(page)
    stored = {sample["__key__"]: sample["mp4"] for sample in Variant(shard_set.variant).iterate()}
    assert [(tmp_path / clip).read_bytes() for clip in page_read.clips] == [stored[key] for key in page_read.keys]
    assert page_read.keys == KEYS and {clip.split("/")[0] for clip in page_read.clips} == {folder.name}
    (folder / "notes.txt").write_text("mine")
    before = identities(folder)
    values = prep("inspect", "--html", page, "--data", shard_set.data, "--json").summary
    assert identities(folder) == before and values["clip_bytes"] == sum(map(len, stored.values()))
    prep("inspect", "--html", page, "--chunks", 2, "--data", shard_set.data)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["notes.txt", *(Path(clip).name for clip in _Page(page).clips)]
    )


@pytest.mark.usefixtures("beside")
def test_many_chunks_are_pages_that_lead_to_each_other(
    shard_set: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "PAGE_CHUNKS", 2)
    first, folder = tmp_path / "é #1.html", tmp_path / "é #1.files"
    report = write_chunk_page(Variant(shard_set.variant), PageRequest(first, num_samples=5))
    assert report.values["num_pages"] == 3 and "on 3 pages" in report.text
    pages = {path: _Page(path) for path in (first, folder / "page-2.html", folder / "page-3.html")}
    assert [key for page in pages.values() for key in page.keys] == KEYS
    everything = folder / "all.html"
    assert _Page(everything).keys == KEYS and not _Page(everything).clips
    for path, page in {**pages, everything: _Page(everything)}.items():
        for address in (*page.clips, *page.links):
            target, _, anchor = address.partition(".html#") if ".html#" in address else (address, "", "")
            named = (path.parent / (f"{target}.html" if anchor else target)).resolve()
            assert named.is_file(), address
            assert not anchor or anchor in _Page(named).keys
    assert len([link for link in _Page(everything).links if "#" in link.replace("#1", "")]) == 5
    monkeypatch.setattr(write, "PAGE_CHUNKS", 150)
    write_chunk_page(Variant(shard_set.variant), PageRequest(first))
    assert not list(folder.glob("*.html")) and len(list(folder.glob("*.mp4"))) == 5


def test_what_browsers_do_not_play_is_encoded_again(
    shard_set: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {codec: cards.plan_clips(codec, total_bytes=1000) for codec in ("h264", "av1", "vp9", "hevc", "mjpeg")}
    assert [plan.is_preview for plan in made.values()] == [False, False, False, True, True]
    assert "browsers do not play MJPEG in MP4" in made["mjpeg"].reason
    assert cards.plan_clips("h264", total_bytes=10**9).is_preview
    monkeypatch.setattr(cards, "COPIED_BYTES", 0)
    report = write_chunk_page(Variant(shard_set.variant), PageRequest(tmp_path / "page.html", num_samples=1))
    assert report.values["clips"] == "preview" and "Clips are previews" in (tmp_path / "page.html").read_text()
    [path] = (tmp_path / "page.files").iterdir()
    with av.open(BytesIO(path.read_bytes()), "r", format="mp4") as container:
        frames = [read_frame_number(frame.to_ndarray(format="gray")) for frame in container.decode(video=0)]
    [key] = _Page(tmp_path / "page.html").keys
    begin = int(key.rpartition("_")[2]) * 30 // 1000
    assert frames == list(range(begin, begin + 2 * len(frames), 2)) and len(frames) >= 15


@pytest.mark.parametrize("num_chunks", [1, 2, 7, 50, 999, 1300, 5000])
def test_a_choice_is_spread_over_splits_and_time(num_chunks: int) -> None:
    splits = {"train": 1000, "val": 10, "test": 300}
    chunks = chunks_of(splits)
    picked = choose_chunks(chunks, num_chunks=num_chunks)
    assert len(picked) == min(num_chunks, 1310) and (np.diff(picked) > 0).all()
    shares = np.bincount(chunks.split[picked], minlength=3)
    if num_chunks >= 7:
        assert shares.min() >= min(10, num_chunks // 6) and shares[0] == shares.max()
    for split, size in enumerate(splits.values()):
        if shares[split]:
            gaps = np.diff(picked[chunks.split[picked] == split])
            assert len(gaps) == 0 or gaps.max() <= size // shares[split] + 1


def test_the_captions_of_chunks_are_counted_as_the_shards_have_them(shard_set: ShardSet) -> None:
    variant = Variant(shard_set.variant)
    stored = {sample["__key__"]: len(json.loads(sample["json"])["captions"]) for sample in variant.iterate()}
    for _ in range(2):
        chunks = read_chunks(variant)
        counts = count_captions(chunks, shard_set.data)
        assert {chunks.key(row): int(count) for row, count in enumerate(counts)} == stored and counts.any()
        (shard_set.variant / "chunks.arrow").unlink(missing_ok=True)  # then the chunks are read from the indexes


def test_what_is_missing_or_damaged_is_a_named_hole(prep: Prep, shard_set: ShardSet, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    place = Variant(shard_set.variant).shards()[0].member_range(1, "mp4")[0]
    flip(shard_set.tar(0), place + 100)
    shard_set.tar(1).unlink()
    values = prep("inspect", "--html", page, "--data", shard_set.data, "--json").summary
    assert (values["num_chunks"], values["num_unreadable"]) == (5, 3)
    text = html.unescape(page.read_text())
    assert len(_Page(page).clips) == 2 and "differs from the commit" in text
    assert f"Shard 000001 (val, 2 chunks): {shard_set.tar(1).name} is missing" in text
    shard_set.index(1).write_bytes(b"no index")
    (shard_set.variant / "chunks.arrow").write_bytes(b"no table")
    (shard_set.data / "manifest" / "manifest.json").unlink()
    stdout = prep("inspect", "--html", page, "--data", shard_set.data).stdout
    assert "3 chunks" in stdout and "1 shard missing or damaged, 1 chunk cannot be shown: run `prep verify`" in stdout
    assert "Not shown: no manifest" in page.read_text()
    shard_set.index(0).write_bytes(b"no index")
    assert "no readable shards" in prep("inspect", "--html", page, "--data", shard_set.data, status=2).error


def test_an_expression_chooses_the_chunks(prep: Prep, shard_set: ShardSet, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    prep("inspect", "--html", page, "--where", "split == 'val' and duration_s > 1.5", "--data", shard_set.data)
    assert _Page(page).keys == ["short_000000000"]
    assert "1 of 5 chunks, selected by split == 'val'" in html.unescape(page.read_text())
    for arguments, error in (
        (("--html", page, "--where", "duration_s > 60"), "matches none of the 5 chunks"),
        (("--html", page, "--where", "words > 1"), "the page shows chunks"),
        (("--html", page, "--chunks", 0), "--chunks 0 is below 1"),
        (("--where", "start_ms > 1"), "--where has no effect without a page"),
    ):
        assert error in prep("inspect", *arguments, "--data", shard_set.data, status=2).error


def test_labels_choose_chunks_and_stand_on_their_cards(prep: Prep, shard_set: ShardSet, tmp_path: Path) -> None:
    # Two captions of a video share its label, which the manifest stores once; the other label belongs to a part of a
    # video.
    rows = [
        {"video": "short", "split": "val", "text": ["a", "b"], "label_success": True},
        {
            "video": "long",
            "split": "train",
            "text": "c",
            "begin_s": 0.5,
            "end_s": 2.5,
            "label_success": False,
            "label_speed": "fast",
        },
    ]
    table = tmp_path / "labels.json"
    table.write_text(json.dumps(rows))
    videos = Path(read_videos(shard_set.data)["path"][0].as_py()).parent
    prep("manifest", "folder", videos, "--captions", table, "--data", shard_set.data, status=None)
    page = tmp_path / "page.html"
    for where, keys in (
        ("label_success = 'true'", KEYS[3:]),
        ("label_success = 'false' and begin_s > 1", KEYS[1:2]),
        ("label_success = 'true' or label_speed = 'fast'", [*KEYS[:2], *KEYS[3:]]),
        ("label_success is null", KEYS[2:3]),
    ):
        prep("inspect", "--html", page, "--where", where, "--data", shard_set.data)
        assert _Page(page).keys == keys
    prep("inspect", "--html", page, "--data", shard_set.data)
    cards = re.split("<article ", page.read_text())[1:]
    assert [re.findall("Labels: <bdi>(.*)</bdi>", card) for card in cards] == [
        *[["speed fast, success false"]] * 2, [], *[["success true"]] * 2,
    ]  # fmt: skip
    menus = dict(re.findall('<select name="(label=[^"]*)">(.*)</select>', page.read_text()))
    assert list(menus) == ["label=success"], "a menu with one value does not distinguish chunks"
    assert re.findall("<option[^>]*>([^<]*)", menus["label=success"]) == ["all", "false", "true"]
    filters = [json.loads(html.unescape(value)) for value in re.findall('data-labels="([^"]*)"', page.read_text())]
    assert filters == [*[["speed=fast", "success=false"]] * 2, *[["success=true"]] * 2]
    error = prep("inspect", "--html", page, "--where", "label_grip = 'x'", "--data", shard_set.data, status=2).error
    assert "have no column label_grip" in error


def test_any_text_of_a_chunk_is_shown_as_text() -> None:
    long = "x" * 5000
    hidden = "👩‍👩‍👧 a\x07b\u202ec\u2066d\ud800"
    texts = [NASTY, "مرحبا", hidden, long, *[f"caption {number}" for number in range(400)]]
    captions = tuple(CaptionLine(text, 0.0, None) for text in texts)
    odd = f'"{NASTY}'
    card = Card(
        key=odd, video_id=odd, split=odd, dataset=odd, source_id=odd, path=odd, facts=odd, captions=captions,
        begin_s=0.0, end_s=3725.5, size_bytes=10,
    )  # fmt: skip
    cards = load_template(TEMPLATE.with_name("card.html.j2")).module
    page = str(cards.chunk(card, 0, ""))  # type: ignore[attr-defined]
    text = html.unescape(page)
    assert "<script" not in page and 'id="&#34;&lt;script' in page and "0:00 to 1:02:05.5" in page
    assert text.count('dir="auto"') == 3 + 100 and "and 401 more captions" in text and "and 301 more" in text
    assert r"a\x07b\u202ec\u2066d\ud800" in page and not re.search("[\x07\u202e\u2066]", page) and "👩‍👩‍👧" in page
    assert long[:1001] not in text and "(5,000 characters)" in text and "مرحبا" in text and len(text) < 30_000


def histogram_html(bars: Histogram, *, title: str, unit: str = "") -> str:
    template = load_template(Path(templates.__file__).with_name("histogram.html.j2"))
    return str(template.module.histogram(bars, title, unit))  # type: ignore[attr-defined]


def test_every_bar_of_a_histogram_has_a_text() -> None:
    lengths = np.array([*[15.0] * 50, 3.2, 4.0])
    text = histogram_html(histogram(lengths), title="Length", unit="s")
    assert 'role="list" aria-label="Length: histogram of 52 values from 0 to 15 s"' in text
    assert re.findall(r'role="listitem" aria-label="([^"]+)"', text) == [
        *("2.81 to 3.28 s: 1 chunk", "3.75 to 4.22 s: 1 chunk", "14.5 to 15 s: 50 chunks")
    ]
    counts = histogram_html(histogram(np.array([0.0, 0.0, 3.0]), is_count=True), title="Captions")
    assert "0: 2 chunks" in counts and "3: 1 chunk" in counts
    assert '<span class="ticks bins"><span>0</span><span>1</span><span>2</span><span>3</span></span>' in counts
    many = histogram_html(histogram(np.array([0.0, 127.0]), is_count=True), title="Captions")
    assert re.findall("<span>([^<]+ to [^<]+)</span>", many) == ["16 to 19", "48 to 51", "80 to 83", "112 to 115"]
    kept = histogram(np.array([0.1, 0.9]), bounds=(0.0, 1.0), is_kept=np.array([True, False]))
    assert "1 chunk, 0 kept" in histogram_html(kept, title="Black")


def test_a_page_of_a_bucket_reads_ranges_of_its_tars(
    made_set: Path, bucket: str, faults: Faults, other_machine: Callable[[], Path], tmp_path: Path
) -> None:
    other_machine()
    upload(made_set, f"{bucket}/data")
    faults.set()
    ran = prep_here("inspect", "--html", tmp_path / "page.html", "--chunks", 2, "--data", f"{bucket}/data")
    assert "2 of 5 chunks" in ran.stdout
    assert len(_Page(tmp_path / "page.html").clips) == 2
    seen = faults.seen()
    tars = [path for method, path in seen.requests if method == "GET" and path.endswith(".tar")]
    tar_bytes = sum(path.stat().st_size for path in made_set.rglob("*.tar"))
    assert len(tars) == 4 and seen.num_bytes < tar_bytes + 100_000


_DRIVE = """
  const shown = () => [...document.querySelectorAll("article")].filter((card) => !card.hidden).map((card) => card.id);
  const overflow = () => document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const form = document.querySelector(".filters"), field = (name) => form.querySelector(`[name=${name}]`);
  const set = (name, value) => {
    field(name).value = value;
    for (const kind of ["input", "change"]) field(name).dispatchEvent(new Event(kind, {bubbles: true}));
    return shown();
  };
  const found = { hidden: form.hidden, before: overflow() };
  found.caption = set("q", "THE  end");
  found.none = set("q", "nothing of the kind");
  found.message = !document.querySelector(".none").hidden;
  form.querySelector("button").click();
  found.split = set("split", "val");
  found.status = form.querySelector("output").textContent;
  form.querySelector("button").click();
  found.sorted = set("sort", "length");
  const [video, broken] = document.querySelectorAll("video");
  const play = document.querySelector(".play");
  found.label = play.getAttribute("aria-label");
  play.focus();
  play.click();
  found.focus = document.activeElement === video;
  await new Promise((done) => { video.ontimeupdate = () => video.currentTime > 0 && done(); video.onerror = done; });
  found.width = video.videoWidth;
  broken.src = "gone.mp4";
  broken.load();
  await new Promise((done) => broken.addEventListener("error", () => setTimeout(done)));
  found.note = document.querySelector("[role=alert]").textContent;
  found.unnamed = [...document.querySelectorAll("img, video, button, input, select")].filter((one) =>
    !(one.alt || one.getAttribute("aria-label") || one.labels?.length || one.textContent.trim())).length;
  found.after = overflow();
  found.paper = getComputedStyle(document.body).backgroundColor;
  return found;
"""


@needs_chromium
@pytest.mark.usefixtures("beside")
def test_a_browser_plays_filters_searches_and_sorts(shard_set: ShardSet, tmp_path: Path) -> None:
    write_chunk_page(Variant(shard_set.variant), PageRequest(tmp_path / "page.html"))
    for width_px, is_dark, paper in ((420, True, "rgb(18, 21, 26)"), (1400, False, "rgb(245, 246, 248)")):
        with show_page(tmp_path / "page.html", width_px=width_px, is_dark=is_dark) as tab:
            page = tab.value(f"(async () => {{ {_DRIVE} }})()")
            assert [line for line in tab.messages if "ERR_FILE_NOT_FOUND" not in line] == []
            assert (page["hidden"], page["before"], page["after"], page["unnamed"]) == (False, 0, 0, 0), width_px
            assert page["caption"] == ["long_000004000"] and page["none"] == [] and page["message"] is True
            assert page["split"] == KEYS[3:] and page["status"] == "2 of 5 on this page"
            assert page["sorted"] == [KEYS[0], KEYS[1], KEYS[3], KEYS[2], KEYS[4]]
            assert page["label"] == "Play long_000000000, 0:00 to 0:02 of long"
            assert page["width"] == 128 and page["focus"] is True and page["paper"] == paper
            assert "cannot be played" in page["note"]
