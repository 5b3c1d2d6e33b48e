"""Parts of other packages: what is said of those that cannot be used."""

import re
from pathlib import Path

import pytest

from clipmill.manifests.help_text import help_text
from clipmill.manifests.plugins import Parts, UnusablePart
from clipmill.prep.cli import build_app
from clipmill.prep.registry import COLUMNS
from clipmill.shards.column_fields import COLUMN_FIELDS
from clipmill.train.cli import app as train_app
from clipmill.train.losses.settings import LOSSES, Loss
from clipmill.train.registry import TASKS
from tests.forked import run_forked
from tests.plugins import declare, installed_here

DECOUPLED = "clipmill_example.decoupled:DECOUPLED"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:LOSS", "cannot be imported: ModuleNotFoundError"),
        ("clipmill_example.decoupled:decoupled", "has type function, not LossSpec"),
        (DECOUPLED, "is called 'decoupled' in its own code"),
    ],
)
def test_a_part_that_cannot_be_used_is_named_with_its_package_and_stops_nothing_else(
    tmp_path: Path, path: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    declare(tmp_path, "odd", {"losses": {"odd-one": path, "infonce": DECOUPLED}})
    with installed_here(tmp_path):
        with pytest.raises(UnusablePart, match=message) as error:
            LOSSES["odd-one"]
        assert "of the package odd 1.0" in str(error.value) and f'odd-one = "{path}"' in str(error.value)
        assert "odd-one" not in {loss.name for loss in LOSSES.list_usable()}
        assert LOSSES["infonce"].load().__module__.startswith("clipmill.")
        LOSSES.list_usable()
        warned = capsys.readouterr().err
        assert warned.count(message) == 1, "each lookup warned"
        assert "infonce of the package odd 1.0 has a name that is already in use" in warned
    assert "odd-one" not in LOSSES


def test_a_column_that_cannot_be_used_stops_neither_the_help_nor_the_completion(tmp_path: Path) -> None:
    declare(tmp_path, "odd", {"columns": {"odd": "no_such_module:COLUMN"}})

    def look() -> None:
        with installed_here(tmp_path):
            app = build_app()
            listed = help_text(app, ["--help"])
            assert re.search(r"^  odd +This command cannot be used; run it to see why\.$", listed, re.MULTILINE)
            assert "odd" in app.generate_completion(shell="bash")  # noqa: S604 - no program is started
            for words in (["odd", "--every", "2"], ["plan", "odd"]):
                with pytest.raises(UnusablePart, match="cannot be imported: ModuleNotFoundError"):
                    app(words, exit_on_error=False, print_error=False)

    status, output = run_forked(look)
    assert status == 0, output


def test_a_loss_with_a_setting_that_there_is_not_stops_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "odd_settings.py").write_text(
        "from clipmill.train.losses.settings import LossSpec\n"
        "LOSS = LossSpec(name='odd-settings', loss='odd:loss', settings={'temprature': 0.07})\n"
    )
    declare(tmp_path, "odd", {"losses": {"odd-settings": "odd_settings:LOSS"}})
    with installed_here(tmp_path):
        assert Loss().kind == "infonce"
        with pytest.raises(UnusablePart, match="has settings that --loss does not define: temprature"):
            LOSSES["odd-settings"]


def test_fields_without_a_column_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd_fields.py").write_text("from clipmill_example.brightness import FIELDS\n")
    declare(tmp_path, "odd", {"fields": {"brightness": "odd_fields:FIELDS"}})
    with installed_here(tmp_path):
        assert COLUMN_FIELDS.list_usable() == []
    warned = capsys.readouterr().err
    assert "odd 1.0 does not belong to a column: clipmill.columns has no entry point named brightness" in warned


@pytest.mark.parametrize(
    ("parts", "allowed", "name"), [(LOSSES, "digits and -", "My_Loss"), (COLUMN_FIELDS, "digits and _", "my-column")]
)
def test_a_name_that_is_not_allowed_is_refused_with_the_allowed_characters(
    tmp_path: Path, parts: Parts[object], allowed: str, name: str
) -> None:
    declare(tmp_path, "odd", {"losses": {name: DECOUPLED}, "fields": {name: DECOUPLED}})
    with installed_here(tmp_path), pytest.raises(UnusablePart, match="has an invalid name") as error:
        parts[name]
    assert str(error.value.hint).endswith(f"a lower-case letter, then lower-case letters, {allowed}")


def test_of_two_packages_with_one_name_neither_is_chosen(tmp_path: Path) -> None:
    spec = "clipmill_example.frame_order.spec:TASK"
    for package in ("one", "two"):
        declare(tmp_path, package, {"tasks": {"frame-order": spec}})
    with installed_here(tmp_path), pytest.raises(UnusablePart, match=r"declared by (one|two) 1\.0 and by"):
        TASKS["frame-order"]


def test_plugins_cannot_take_the_name_of_a_command() -> None:
    for app, parts, folders in ((build_app(), COLUMNS, {"layout", "manifest", "synthetic"}), (train_app, TASKS, set())):
        commands = {name for name in app if not name.startswith("-") and name not in parts}
        assert commands | folders <= parts._reserved_names
