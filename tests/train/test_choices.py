"""A preset with a different loss or optimizer uses the published row, and none of its own hyperparameters."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clipmill.train.config.training import flatten, plain_values
from clipmill.train.losses.settings import LOSSES
from clipmill.train.run.folder import RunFolder, read_lines
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from tests.train.fastclip_tables import losses_of, optimizers_of
from tests.train.running import error_of, train

Launch = Callable[..., tuple[DualEncoderSettings, list[str]]]


@pytest.fixture
def launch_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launch:
    """Function that returns the settings of a command line and the remarks about them, without running it."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)

    def launch(*words: object) -> tuple[Any, list[str]]:
        result: list[Any] = []
        monkeypatch.setattr(
            "clipmill.train.commands.launch.launch",
            lambda spec, settings, resume, provenance: result.extend((settings, provenance.remarks)),
        )
        assert train(*words) == 0
        return result[0], result[1]

    return launch


def values_of(settings: DualEncoderSettings) -> dict[str, Any]:
    return flatten(plain_values(asdict(settings)))


@pytest.mark.parametrize("size", ["medium", "large", "xlarge"])
def test_every_loss_and_optimizer_of_fastclip_has_the_values_of_its_row_and_no_others(
    launch_settings: Launch, size: str
) -> None:
    losses, optimizers = losses_of(size), optimizers_of(size)
    runs = [(loss, "adamw") for loss in losses] + [("fastclip-v3", name) for name in optimizers]
    for loss, optimizer in runs:
        words = ("--preset", f"fastclip-{size}", "--loss.kind", loss, "--optimizer.name", optimizer)
        settings, remarks = launch_settings("dual-encoder", *words)
        values = values_of(settings)
        given_values = {f"loss.{name}": value for name, value in losses[loss].items()} | optimizers[optimizer]
        assert {name: values[name] for name in given_values} == given_values
        others = {f"loss.{name}" for loss_settings in losses.values() for name in loss_settings}
        others |= {name for optimizer_settings in optimizers.values() for name in optimizer_settings}
        assert {name: values[name] for name in others - set(given_values)} == dict.fromkeys(others - set(given_values))
        assert len(remarks) == 2
        for remark, choice in zip(remarks, (f"--loss.kind {loss}", f"--optimizer.name {optimizer}"), strict=True):
            assert remark.startswith(f"preset fastclip-{size}, {choice} (FastCLIP, ")


def test_a_choice_without_a_row_is_named_and_has_the_defaults(launch_settings: Launch) -> None:
    words = ("--preset", "fastclip-xlarge", "--loss.kind", "sogclr", "--optimizer.name", "lion")
    settings, remarks = launch_settings("dual-encoder", *words)
    assert remarks == [
        "preset fastclip-xlarge has no values for --loss.kind sogclr, only for mbcl, fastclip-v3; defaults: "
        "--loss.temperature 0.03 --loss.gamma 0.6 --loss.gamma-schedule constant",
        "preset fastclip-xlarge has no values for --optimizer.name lion, only for adamw; defaults: "
        "--lr 0.0003 --weight-decay 0.1 --optimizer.beta1 0.9 --optimizer.beta2 0.99",
    ]
    default = values_of(DualEncoderSettings())
    names = ("lr", "weight_decay", "optimizer.beta2", "loss.rho", "loss.temperature_lr", "loss.gamma")
    assert [values_of(settings)[name] for name in names] == [default[name] for name in names]
    assert (settings.loss.number("gamma"), settings.optimizer.number("beta2")) == (0.6, 0.99)


def test_a_flag_and_a_file_are_stronger_than_the_row_and_a_file_chooses_too(
    launch_settings: Launch, tmp_path: Path
) -> None:
    chosen = tmp_path / "chosen.yaml"
    chosen.write_text("loss: {kind: isogclr, rho: 3.0}\n")
    words = ("--preset", "fastclip-medium", "--config", chosen, "--loss.gamma", 0.9)
    settings, (remark, _) = launch_settings("dual-encoder", *words)
    assert (settings.loss.kind, settings.loss.rho, settings.loss.gamma) == ("isogclr", 3.0, 0.9)
    assert settings.loss.temperature_lr == 1e-2
    assert remark.endswith(": --loss.temperature 0.03 --loss.temperature-lr 0.01 --loss.gamma-schedule constant")


def test_a_table_of_values_by_a_setting_is_not_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.yaml").write_text("by: {loss.kind: {infonce: {loss: {rho: 1}}}}")
    assert train("dual-encoder", "--config", tmp_path / "own.yaml", "--model", "tiny") == 2
    assert error_of(capsys).startswith("error: unknown key by.loss.kind")


@pytest.mark.parametrize(
    ("words", "left_out", "lacks"),
    [
        (
            "dual-encoder --preset b16-ek100-mir --loss.kind infonce",
            "--loss.kind max-margin are not used with infonce: --loss.margin 0.2",
            {"loss.margin": None},
        ),
        (
            "dual-encoder --preset b16-ego4d --loss.kind fastclip-v3",
            "--loss.kind infonce are not used with fastclip-v3: --loss.freeze-temperature True",
            {"loss.freeze_temperature": False},
        ),
        (
            "dual-encoder --preset b16-ego4d --optimizer.name lion --optimizer.beta2 0.95",
            "--optimizer.name adamw are not used with lion: --optimizer.eps 1e-08",
            {"optimizer.eps": None, "optimizer.beta2": 0.95},
        ),
        (
            "classify --preset b16-ek100-cls --optimizer.name adamw",
            "--optimizer.name sgd are not used with adamw: --optimizer.momentum 0.9",
            {"optimizer.momentum": None, "lr": 0.012},
        ),
    ],
)
def test_what_a_preset_has_for_its_own_choice_is_not_used_with_another(
    launch_settings: Launch, words: str, left_out: str, lacks: dict[str, Any]
) -> None:
    settings, (remark,) = launch_settings(*words.split())
    assert remark == f"preset {words.split()[2]}: values for {left_out}"
    assert {name: values_of(settings)[name] for name in lacks} == lacks


@pytest.mark.parametrize("preset", ["tiny", "b16-ego4d", "b16-ek100-mir", "fastclip-medium", "fastclip-xlarge"])
def test_every_loss_and_optimizer_goes_with_every_kind_of_preset(launch_settings: Launch, preset: str) -> None:
    for kind in LOSSES:
        settings, _ = launch_settings(
            "dual-encoder", "--preset", preset, "--loss.kind", kind, "--optimizer.name", "lion"
        )
        assert (settings.loss.kind, settings.optimizer.name) == (kind, "lion")


@pytest.mark.parametrize(
    ("command", "named"), [("dual-encoder", "use --preset fastclip-medium"), ("mae", "use a preset of train mae")]
)
def test_a_preset_of_the_old_name_is_refused_with_the_new_one(
    capsys: pytest.CaptureFixture[str], command: str, named: str
) -> None:
    assert train(command, "--preset", "fastclip-v3-medium") == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: preset 'fastclip-v3-medium' no longer exists" and named in hint


def test_a_run_says_and_saves_where_its_values_come_from(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    small = ("--model", "tiny", "--num-frames", 2, "--size-px", 32, "--batch", 2, "--steps", 1, "--device", "cpu")
    words = ("--preset", "fastclip-medium", "--loss.kind", "sogclr", "--shards", data_dir, "--out", out, *small)
    assert train("dual-encoder", *words) == 0
    row = "preset fastclip-medium, --loss.kind sogclr (FastCLIP, table 8 and appendix B): "
    assert f"{row}--loss.temperature 0.03 --loss.gamma 0.6" in capsys.readouterr().out
    head = RunFolder(out).settings.read_text().partition("\nshards:")[0]
    joined = " ".join(line.removeprefix("#").strip() for line in head.splitlines())
    assert f"{row}--loss.temperature --loss.gamma --loss.gamma-schedule" in joined
    assert "flags: --shards --out" in joined
    assert len(read_lines(RunFolder(out).metrics)) == 1
    # The comment is not part of the settings, so the same run continues.
    assert train("dual-encoder", "--resume", "--out", out, "--shards", data_dir) == 0


DECODINGS: list[tuple[str, dict[str, Any]]] = [
    ("--decoding.method greedy", {"method": "greedy", "num_beams": None, "max_tokens": 40}),
    (
        "--decoding.method sample --decoding.top-k 5 --decoding.top-p 0.9",
        {"method": "sample", "num_beams": None, "top_k": 5, "top_p": 0.9, "max_tokens": 40},
    ),
    ("", {"method": "beam", "num_beams": 8}),
    ("--decoding.method beam", {"method": "beam", "num_beams": 8}),
    ("--decoding.num-beams 2", {"method": "beam", "num_beams": 2}),
]


@pytest.mark.parametrize(("flags", "expected"), DECODINGS)
def test_a_flag_selects_another_decoding_than_that_of_a_preset(
    launch_settings: Launch, flags: str, expected: dict[str, Any]
) -> None:
    settings, remarks = launch_settings("caption", "--preset", "vatex-timesformer-gpt2", *flags.split())
    assert {name: values_of(settings)[f"decoding.{name}"] for name in expected} == expected
    remarks_found = [remark for remark in remarks if "--decoding.num-beams is not used with" in remark]
    assert bool(remarks_found) == (expected["num_beams"] is None)


def test_a_value_that_does_nothing_is_refused_if_a_flag_or_the_same_file_gives_it(
    launch_settings: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "own.yaml"
    config.write_text("decoding: {method: greedy, num-beams: 3}")
    typed = ("--preset", "vatex-timesformer-gpt2", "--decoding.method", "greedy", "--decoding.num-beams", 3)
    for words in (typed, ("--config", config)):
        assert train("caption", *words) == 2
        assert error_of(capsys) == "error: --decoding.num-beams 3 has no effect with --decoding.method greedy"
    # A file with higher priority also selects a method, and so does a flag beside a file.
    stronger = tmp_path / "greedy.yaml"
    stronger.write_text("decoding: {method: greedy}")
    settings, _ = launch_settings("caption", "--preset", "vatex-timesformer-gpt2", "--config", stronger)
    assert values_of(settings)["decoding.num_beams"] is None
    config.write_text("decoding: {method: beam, num-beams: 3}")
    settings, _ = launch_settings("caption", "--config", config, "--decoding.method", "greedy")
    assert values_of(settings)["decoding.num_beams"] is None
