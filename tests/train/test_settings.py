import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import clipmill.train.commands.launch
from clipmill.manifests.errors import UserError, UserErrors
from clipmill.manifests.settings import Range, deferred_checks, mistakes
from clipmill.train.cli import app
from clipmill.train.config.evaluation import ProbeEvaluation
from clipmill.train.config.files import PRESETS_FOLDER, load_settings, preset_path, save_settings
from clipmill.train.config.model import Towers
from clipmill.train.config.training import FREE_ON_RESUME, TrainingSettings, require_same, weight_settings
from clipmill.train.registry import find_task, task_names
from clipmill.train.tasks.caption.spec import CaptionerSettings, CaptionEvaluation
from clipmill.train.tasks.classify.spec import ClassifySettings
from clipmill.train.tasks.dual_encoder.spec import DualEncoderEvaluation, DualEncoderSettings
from clipmill.train.tasks.mae.spec import MaeOptimizer, MaeSettings
from tests.train.running import train


def test_saved_settings_load_back_equal(tmp_path: Path) -> None:
    settings = DualEncoderSettings(
        shards="/some where/data", lr=1e-5, model="tiny", steps=7, min_crop_area=1 / 3, split="1e3", size_px=64
    )
    save_settings(settings, tmp_path / "settings.yaml")
    assert load_settings(tmp_path / "settings.yaml", DualEncoderSettings) == settings


@pytest.mark.parametrize("path", sorted(PRESETS_FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_preset_loads_and_says_on_top_what_it_costs(path: Path) -> None:
    top, *lines = path.read_text().splitlines()
    keys = {line.partition(":")[0] for line in lines}
    task_settings = {"label": ClassifySettings, "mask_ratio": MaeSettings, "decoder": CaptionerSettings}
    kinds = [kind for key, kind in task_settings.items() if key in keys]
    load_settings(path, *(kinds or [DualEncoderSettings]))
    assert top.startswith("# ") and len(top) > 20


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("steps", 0, "from 1 to 10,000,000,000"),
        ("steps", -5, "from 1 to"),
        ("batch", 1, "2 or more"),
        ("num_frames", 0, "from 1 to 1,024"),
        ("size_px", 40, "multiple of 16"),
        ("size_px", 0, "from 2 to 4,096"),
        ("lr", 0.0, "from 1e-12 to"),
        ("lr", float("nan"), "from 1e-12 to"),
        ("lr", float("inf"), "from 1e-12 to"),
        ("min_crop_area", 1.5, "at most 1"),
        ("seed", -1, "from 0 to"),
        ("seed", 10**20, "from 0 to"),
        ("workers", 0, "from 1 to 1,024"),
        ("size_px", 16_000_000, "from 2 to 4,096"),
    ],
)
def test_a_setting_out_of_range_is_named(field: str, value: float, rule: str) -> None:
    changed: dict[str, Any] = {field: value}
    with pytest.raises(UserError, match=f"--{field.replace('_', '-')} (is )?{value}") as caught:
        DualEncoderSettings(**changed)
    assert rule in (caught.value.hint or "")


def test_all_mistakes_are_named_at_once_and_none_twice() -> None:
    with pytest.raises(UserErrors) as caught:
        DualEncoderSettings(steps=0, lr=math.nan, batch=1, seed=-1, size_px=40, best="val/x")
    named = [str(mistake) for mistake in caught.value.errors]
    assert named == [
        *(f"{flag}, which is out of range" for flag in ("--steps is 0", "--lr is nan", "--seed is -1")),
        "--best val/x needs evaluations during training",
        *(
            "--batch is 1, but a contrastive loss needs at least 2 samples",
            "--size-px 40 is not a multiple of 16, the patch size of b16",
        ),
    ]
    assert str(caught.value).splitlines() == named and len((caught.value.hint or "").splitlines()) == 6


@pytest.mark.parametrize(
    ("settings", "is_lowest"),
    [
        (DualEncoderSettings(best="val/text_to_video_median_rank", evaluate=DualEncoderEvaluation(every=1)), True),
        (
            DualEncoderSettings(
                best="val/video_to_text_dual_softmax_median_rank",
                evaluate=DualEncoderEvaluation(every=1, dual_softmax=100.0),
            ),
            True,
        ),
        (DualEncoderSettings(best="val/text_to_video_r1", evaluate=DualEncoderEvaluation(every=1)), False),
        (CaptionerSettings(best="val/loss", evaluate=CaptionEvaluation(every=1)), True),
        (CaptionerSettings(best="val/cider", evaluate=CaptionEvaluation(every=1)), False),
        # The direction of a metric does not depend on the name of a label or of a data folder.
        (MaeSettings(best="val/rank_knn_top1", evaluate=ProbeEvaluation(every=1, labels=("rank",))), False),
        (
            CaptionerSettings(best="rank/bleu4", evaluate=CaptionEvaluation(every=1, shards=("rank=data@val",))),
            False,
        ),
    ],
)
def test_a_metric_says_whether_lower_is_better(settings: TrainingSettings, is_lowest: bool) -> None:
    assert settings.best_is_lowest == is_lowest


def test_a_simple_crop_finds_its_size_in_the_frame() -> None:
    with pytest.raises(UserError, match="--short-side-px 200 is smaller than --size-px 224"):
        DualEncoderSettings(crop="simple", short_side_px=200)


def test_a_rule_does_not_trip_over_what_is_out_of_range() -> None:
    # The patch size cannot be a divisor, and the ratio cannot be rounded. Each is reported once, without subsequent
    # errors.
    with deferred_checks():
        caption = CaptionerSettings(towers=Towers(patch_px=0, drop_path=2), size_px=40)
        mae = MaeSettings(mask_ratio=math.nan, optimizer=MaeOptimizer(end_lr=1.0), lr=0.0)
    out_of_range = "which is out of range"
    assert [str(mistake) for mistake in mistakes(caption)] == [
        f"--towers.patch-px is 0, {out_of_range}",
        f"--towers.drop-path is 2, {out_of_range}",
        "--size-px 40 is not a multiple of 16, the patch size of b16",
    ]
    assert [str(mistake) for mistake in mistakes(mae)] == [
        f"--lr is 0.0, {out_of_range}",
        f"--mask-ratio is nan, {out_of_range}",
    ]


@pytest.mark.parametrize(
    ("values", "words", "inside", "outside"),
    [
        (Range(1, 1024), "from 1 to 1,024", (1, 1024, None), (0, 1025, math.nan)),
        (Range(least=0), "0 or more", (0, 10**30), (-1, math.inf, math.nan)),
        (Range(above=0, most=1), "more than 0 and at most 1", (1e-9, 1), (0, 1.1)),
        (Range(least=0, below=1), "0 or more and less than 1", (0, 0.999), (1, -1e-9)),
        (Range(), "a finite number", (-5,), (math.inf, -math.inf, math.nan)),
        (Range(0, 0.5), "from 0 to 0.5", ((0, 0.5, 0.1), None), ((0, 0.6, 0.1), (math.nan,))),
    ],
)
def test_a_range_says_what_it_holds(
    values: Range, words: str, inside: tuple[object, ...], outside: tuple[object, ...]
) -> None:
    assert str(values) == words
    assert all(map(values.holds, inside)) and not any(map(values.holds, outside))


def test_every_field_of_every_task_has_a_group_and_a_sound_default() -> None:
    for name in task_names():
        assert mistakes(find_task(name).settings()) == []
        for argument in app[name].assemble_argument_collection(parse_docstring=True):
            group = str(argument.parameter.group)
            assert not argument.show or (argument.parameter.help and "_sort_key=" in group), (argument.name, group)
            assert not argument.show or "_name='Parameters'" not in group, argument.name


def test_a_run_of_a_task_loads_no_module_of_another(repository: Path) -> None:
    script = (
        "import sys\n"
        "from clipmill.train.cli import app\n"
        "from clipmill.train.commands.training import parse\n"
        "parse(app, ['dual-encoder', '--steps', '3'])\n"
        "others = ('clipmill.train.tasks.mae', 'clipmill.train.tasks.classify', 'clipmill.train.tasks.caption')\n"
        "print([name for name in sys.modules if name.startswith(others)])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stepz: 3", r"unknown key stepz in .*bad.yaml; did you mean steps\?"),
        ("loss: {kindd: a}", r"unknown key loss.kindd in .*bad.yaml; did you mean loss.kind\?"),
        ("steps: many", "steps"),
        ("- 1", "contains no settings"),
        ("steps: 1\nlr: [", r"is not YAML: did not find expected node content \(line [23]\)"),
        ("steps: 1\nsteps: 2", r"is not YAML: duplicate key steps \(line 2\)"),
        ("max-failures: 1\nmax_failures: 2", "is not YAML: duplicate key max_failures"),
        ("evaluate: {every: 1, every: 2}", "is not YAML: duplicate key every"),
        ("steps: 2024-13-45", "is not YAML: month"),
        ("steps: " + "9" * 10_000, "is not YAML: Exceeds the limit"),
        ("steps: " + "[" * 100_000 + "]" * 100_000, "too deeply nested values"),
        ("loss: &a\n  kind: *a", "too deeply nested values for a settings file"),
        (
            "\n".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9) if n else 1}]" for n in range(9)),
            "too many or too deeply nested values",
        ),
        ("seed: " + "x" * 100_000, "a value of 100,000 characters"),
        ("steps: 0", "--steps is 0"),
        ("steps: 0\nlr: 0\ntowers: {drop_path: 2}", "(?s)--steps is 0.*--lr is 0.*--towers.drop-path is 2"),
        ("model: huge", "huge"),
        ("a: " + "[" * 1_000, "too deeply nested values"),
        ("towers: " + "{a: " * 120 + "1" + "}" * 120, "too deeply nested values"),
    ],
)
def test_a_bad_file_of_settings_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        load_settings(path, DualEncoderSettings)
    assert str(path) in str(caught.value) and "is cut off" in str(caught.value)
    # A run cannot be used without its settings.
    assert "restore the run's files" in (caught.value.hint or "") and "remove" not in (caught.value.hint or "")
    path.write_text(f"{content}\n")
    with pytest.raises(UserError, match=message) as caught:
        load_settings(path, DualEncoderSettings)
    assert str(path) in str(caught.value) and "is cut off" not in str(caught.value)


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(UserError, match="no preset 'huge'") as caught:
        preset_path("huge")
    assert "tiny" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dual-encoder --preset mae-latents", "'mae-latents' is not a preset of train dual-encoder"),
        ("mae --preset huge", "there is no preset 'huge'"),
        ("bench --preset tiny-mae", "'tiny-mae' is not a preset of train bench"),
    ],
)
def test_a_preset_of_another_task_is_refused_with_those_of_the_command(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert train(*words.split()) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert message in error
    assert hint.startswith(f"hint: use a preset of train {words.split()[0]}: ") and "tiny" in hint


def test_what_shapes_the_weights_may_not_change_on_resume() -> None:
    assert {field.name for task in (DualEncoderSettings, CaptionerSettings) for field in fields(task)} >= FREE_ON_RESUME
    old = DualEncoderSettings()
    changes: dict[str, Any] = {"workers": 9, "out": Path("elsewhere"), "lr": 0.5, "steps": 3}
    shaped = weight_settings(replace(old, **changes))
    assert {name for name, value in weight_settings(old).items() if shaped[name] != value} == {"steps", "lr"}
    for name in ("steps", "lr"):
        with pytest.raises(UserError, match=f"--{name} is .*, but there has {getattr(old, name)}"):
            require_same(weight_settings(old), weight_settings(replace(old, **{name: changes[name]})), where="there")
    nested = replace(old, optimizer=replace(old.optimizer, name="lion"))
    with pytest.raises(UserError, match=r"--optimizer\.name is lion, but there has adamw"):
        require_same(weight_settings(old), weight_settings(nested), where="there")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "10000 0.0003 b16"),
        (["--preset", "tiny"], "{steps} {lr} tiny"),
        (["--preset", "tiny", "--config", "one.yaml"], "11 {lr} tiny"),
        (["--preset", "tiny", "--config", "one.yaml", "--config", "two.yaml"], "22 0.5 tiny"),
        (["--config", "two.yaml", "--steps", "33", "--preset", "tiny"], "33 0.5 tiny"),
    ],
)
def test_flags_go_before_files_before_the_preset(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    (tmp_path / "one.yaml").write_text("steps: 11")
    (tmp_path / "two.yaml").write_text("steps: 22\nlr: 0.5")
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        clipmill.train.commands.launch,
        "launch",
        lambda spec, settings, resume, provenance: print(settings.steps, settings.lr, settings.model),
    )
    assert train("dual-encoder", *arguments) == 0
    tiny = load_settings(preset_path("tiny"), DualEncoderSettings)
    assert capsys.readouterr().out.strip() == expected.format(steps=tiny.steps, lr=tiny.lr)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--preset tiny", "a multiple of 9; --size-px is from preset tiny"),
        ("--preset tiny --config=one.yaml", "a multiple of 9; --size-px is from one.yaml"),
        ("--preset tiny --config one.yaml --size-px 32", "a multiple of 9"),
        ("", "a multiple of 9"),
    ],
)
def test_a_mistake_in_a_value_that_nobody_typed_says_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, hint: str
) -> None:
    (tmp_path / "one.yaml").write_text("size-px: 40")
    monkeypatch.chdir(tmp_path)
    assert train("caption", "--towers.patch-px", "9", *words.split()) == 2
    error, message = capsys.readouterr().err.splitlines()
    assert error.startswith("error: --size-px ") and message.endswith(hint)


@pytest.mark.parametrize(("local_rank", "pauses"), [("", []), ("0", []), ("1", [5.0])])
@pytest.mark.parametrize(
    "words", [["caption", "--steps", "0"], ["caption", "--steps", "many"], ["eval", "probe", "no"]]
)
def test_of_several_processes_the_first_says_a_mistake_and_the_others_wait_to_be_ended(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    local_rank: str,
    pauses: list[float],
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    slept: list[float] = []
    monkeypatch.setattr("clipmill.train.cli.time.sleep", slept.append)
    # No other process ended this one, because only one process was started.
    assert train(*words) == 2 and slept == pauses and capsys.readouterr().err.startswith("error: ")
