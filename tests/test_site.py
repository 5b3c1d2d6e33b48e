"""The documentation site: every document and every command has a page, and all links lead somewhere."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from clipmill.prep.cli import app as prep
from clipmill.train.cli import app as train
from scripts.site import build, messages
from scripts.site.messages import Message, messages_page


@pytest.fixture(scope="module", autouse=True)
def _sources_are_read_once() -> Iterator[None]:
    """By the build and by the tests of what it is made of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "reference_pages", cache(build.reference_pages))
        of_source = messages.messages_of
        patch.setattr(messages, "messages_of", cache(lambda source: list(of_source(source))))
        yield


def test_every_document_has_a_place_in_the_navigation() -> None:
    placed = [name for names in build.SECTIONS.values() for name in names]
    documents = {path.as_posix() for path in build.documents() if path.parts[0] == "docs"}
    assert len(set(placed)) == len(placed)
    assert documents <= set(placed), "add it to a section in scripts/site/build.py"


@pytest.mark.nightly
def test_every_command_has_a_page_with_all_of_its_flags() -> None:
    pages = build.reference_pages()
    for app, program in ((prep, "prep"), (train, "train")):
        commands = {name for name in app if not name.startswith("-")}
        assert {name.split(" ")[0] for name in pages[program]} == commands
    assert "`--parallel.strategy" in pages["train"]["dual-encoder"], "flags that a first run does not need, too"
    assert "`--max-failures STR`" in pages["prep"]["chunk"]
    # A vertical bar would end the cell of a table.
    cells = [line for page in pages["train"].values() for line in page.splitlines() if line.startswith("| `")]
    assert cells and all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in cells)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[data](../docs/data.md#scores)", "[data](../data.md#scores)"),
        ("[the package](../shards)", "[the package](shards/index.md)"),
        ("[format](../shards/format.py)", "format (`shards/format.py`)"),
        ("[`format.py`](../shards/format.py)", "`format.py`"),
        ("[elsewhere](https://arxiv.org/abs/2309.16671)", "[elsewhere](https://arxiv.org/abs/2309.16671)"),
        ("![a page](../docs/pictures/overview.png)", "![a page](../pictures/overview.png)"),
        ("<!-- tested with\ndata: a\n-->\n# Title\n<!-- not run: why -->\ntext", "# Title\ntext"),
    ],
)
def test_links_lead_to_pages_and_name_files_that_are_none(text: str, expected: str) -> None:
    document = Path("prep/README.md")
    pages = {path: build.page_of(path) for path in [*build.documents(), *build.pictures()]}
    pages[document] = Path("code/prep.md")
    assert build.with_links(text, document=document, pages=pages) == expected


def test_the_page_of_messages_has_those_that_commands_print() -> None:
    text = messages_page(Path(build.__file__).parents[2])
    for message, hint in (
        ("the data folder … does not exist", "create a data folder with prep manifest folder VIDEOS --data …"),
        ("--address … requires --engine ray", "omit --engine processes, or omit --address"),
        ("… exists already", "use another --out"),
    ):
        assert f"| {message} | {hint}" in text
    assert text.count("\n| ") > 500
    left = [line for line in text.splitlines() if line.endswith("|  |")]
    assert not left, "give them a hint, or a row in scripts/site/stories.py"


def test_the_stories_are_about_messages_that_exist() -> None:
    """Of docs/troubleshooting.md: each quoted error is one of the source."""
    root = Path(build.__file__).parents[2]
    message_texts = [
        error_text.text
        for name in ("manifests", "shards", "prep", "train")
        for path in (root / name).rglob("*.py")
        for error_text in messages.messages_of(path.read_text())
    ]
    known = [re.compile(".*".join(map(re.escape, re.split(" ?… ?", text)))) for text in message_texts if len(text) > 15]
    told = re.findall(r"^(?:error|failed): (.*)$", (root / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE)
    assert len(told) > 10
    for line in told:
        assert any(pattern.fullmatch(line) for pattern in known), line


def test_a_message_with_alternatives_and_values_is_read_as_each_of_them() -> None:
    source = """raise UserError(f"{a} and {b}{c} differ" if x else "nothing *is* here", hint="try " + name)"""
    assert list(messages.messages_of(source)) == [
        Message("… and … differ", "try …"),
        Message("nothing *is* here", "try …"),
    ]
    assert list(messages.messages_of("HINT = 'wait'\nraise FailedWork('late', hint=HINT)")) == [Message("late", "wait")]


@pytest.mark.nightly
def test_the_site_is_built_without_a_broken_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs")
    monkeypatch.setattr(build, "STAGE", tmp_path / "docs")
    build.main()
    assert "<table>" in (tmp_path / "site" / "reference" / "train" / "mae.html").read_text()
    settings = yaml.safe_load((tmp_path / "docs" / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False, "no fonts from the network"
    loaded = re.findall(
        r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)', (tmp_path / "site/data.html").read_text()
    )
    assert not loaded, "the site loads nothing from elsewhere"
