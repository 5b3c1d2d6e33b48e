"""The files of a run that are appended line by line."""

import threading
from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.run.folder import RunFolder, keep_lines, read_lines, read_object


@pytest.mark.parametrize("bad", ["garbage", "3", '"text"', "\udcff"])
def test_a_damaged_line_is_named_by_its_number(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n'.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl is damaged"):
        read_lines(path)


@pytest.mark.parametrize("line", ['{"loss": 1}', '{"step": "one"}'])
def test_a_line_that_lacks_what_is_asked_for_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(UserError, match="was not written by clipmill"):
        keep_lines(path, lambda value: value["step"] <= 3)


def test_a_line_that_a_kill_cut_short_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert keep_lines(path, lambda value: value["step"] <= 3) == [{"step": 1}]
    assert path.read_text() == '{"step": 1}\n'


def test_a_folder_is_trained_in_by_one_process_at_a_time(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.hold():
        again = RunFolder(tmp_path)
        with pytest.raises(UserError, match="another process trains in"), again.hold():
            pass
    with run.hold():
        pass


def test_a_folder_may_be_waited_for(tmp_path: Path) -> None:
    """A restarted run waits for a process of the previous attempt."""
    run = RunFolder(tmp_path)
    released = threading.Event()

    def hold(begun: threading.Event) -> None:
        with run.hold():
            begun.set()
            released.wait(60)

    begun = threading.Event()
    holder = threading.Thread(target=hold, args=(begun,), daemon=True)
    holder.start()
    assert begun.wait(60)
    with pytest.raises(UserError, match="another process trains in"), run.hold(wait_s=0.3):
        pass
    threading.Timer(0.3, released.set).start()
    with run.hold(wait_s=60):
        assert released.is_set()
    holder.join(60)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", "[" * 200_000, '{"task": 3}', '{"task": "mae", "variants": 5}']
    + [f'{{"task": "mae", "{name}": 1}}' for name in ("evaluated_variants", "sources", "evaluations")],
)
def test_damaged_facts_are_named(tmp_path: Path, content: str) -> None:
    run = RunFolder(tmp_path)
    assert run.read_facts() == {}
    run.facts.write_text(content)
    with pytest.raises(UserError, match=r"run\.json") as caught:
        run.read_facts()
    # Without run.json, the run cannot be identified.
    assert caught.value.hint == "restore the run's files"


def test_facts_that_have_to_be_there_are_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.json is missing") as caught:
        RunFolder(tmp_path).require_facts()
    assert "restore" in (caught.value.hint or "")
    RunFolder(tmp_path).facts.write_text('{"task": "mae"}')
    assert RunFolder(tmp_path).require_facts("task") == {"task": "mae"}
    with pytest.raises(UserError, match="has no valid entry 'variants'"):
        RunFolder(tmp_path).require_facts("task", "variants")


def test_a_damaged_result_may_go(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).evaluation("retrieval-val")
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(UserError, match="cannot be read") as caught:
        read_object(path)
    assert "or remove it" in (caught.value.hint or "")


def test_a_run_of_another_task_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.facts.write_text('{"task": "classify"}')
    run.require_task("classify")
    with pytest.raises(UserError, match="is a run of train classify, not of train dual-encoder"):
        run.require_task("dual-encoder")
