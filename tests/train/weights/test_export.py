# ruff: noqa: RUF001
"""`train export` from a run: open_clip and transformers compute the same features, and the export can be read back."""

import html
import json
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path

import ftfy
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from clipmill.manifests.errors import UserError
from clipmill.train.commands.export import export_run
from clipmill.train.config.files import load_settings
from clipmill.train.config.model import Init, Towers
from clipmill.train.distributed.world import World
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.dual_encoder import DualEncoder, size_of
from clipmill.train.models.text import load_tokenizer
from clipmill.train.run.checkpoint import latest_checkpoint, read_metadata, read_weights
from clipmill.train.run.checkpoint_writer import CheckpointWriter
from clipmill.train.tasks.dual_encoder.export import image_towers
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.weights.sources import open_weights
from tests.train.running import train, weights_of
from tests.train.weights.small import ignore_line, loaded_weights, our_model

SIDE = 32
TOWERS = ["--towers.activation", "quick_gelu", "--towers.video-norm-eps", "1e-6", "--towers.temporal", "random"]
SMALL = ["--model", "tiny", "--num-frames", "2", "--size-px", str(SIDE), "--batch", "4", "--lr", "1e-3", "--steps", "2"]
MEAN = ["--init.pixel-mean", "0.42", "0.46", "0.41"]


@pytest.fixture(scope="module")
def run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of two steps with a temporal embedding, QuickGELU and eps 1e-6."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train("dual-encoder", "--shards", data_dir, "--out", out, *SMALL, *TOWERS, *MEAN) == 0
    return out


def model_of(run: Path, *, num_frames: int) -> DualEncoder:
    settings = load_settings(run / "settings.yaml", DualEncoderSettings)
    size = size_of(settings.model, settings.towers)
    return DualEncoder(size, image_px=SIDE, num_frames=num_frames, attend=attend_with_sdpa).eval()


def picture_features(run: Path, *, rule: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return images and captions, and their features from our towers.

    The video tower sees one frame, with the temporal embedding of the rule.
    """
    weights = weights_of(run)
    model = model_of(run, num_frames=1)
    temporal = weights.pop("video.temporal_embedding")
    embedding = temporal.mean(0, keepdim=True) if rule == "mean" else torch.zeros(1, temporal.shape[1])
    model.load_state_dict({**weights, "video.temporal_embedding": embedding})
    pictures = torch.randn(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    tokenize = load_tokenizer()
    ids = torch.from_numpy(np.stack([tokenize(text) for text in ("a red circle", "it is late, isn't it?", "naïve")]))
    assert model.text is not None
    with torch.no_grad():
        return pictures, ids, model.video(pictures[:, :, None]), model.text(ids)


@pytest.mark.parametrize("rule", ["mean", pytest.param("zero", marks=pytest.mark.nightly)])
def test_open_clip_computes_what_the_run_does(run: Path, tmp_path: Path, rule: str) -> None:
    import open_clip

    out = tmp_path / "exported"
    assert train("export", run, "--format", "open_clip", "--out", out, "--frame-embedding", rule) == 0
    modes = {path.stat().st_mode for path in out.iterdir() if path.is_file()}
    assert len(modes) == 1, "the weights and the other files must have the same mode"
    model = open_clip.create_model(f"local-dir:{out}").eval()
    pictures, ids, video, text = picture_features(run, rule=rule)
    with torch.no_grad():
        torch.testing.assert_close(model.encode_image(pictures), video, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(model.encode_text(ids), text, atol=2e-5, rtol=1e-4)
    assert tuple(model.visual.preprocess_cfg["mean"]) == (0.42, 0.46, 0.41)
    # The weights file is loaded without its folder, with a configuration registered in open_clip.
    config = json.loads((out / "open_clip_config.json").read_text())["model_cfg"]
    (tmp_path / f"exported-{rule}.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / f"exported-{rule}.json")
    by_file = open_clip.create_model(f"exported-{rule}", pretrained=str(out / "open_clip_model.safetensors")).eval()
    with torch.no_grad():
        torch.testing.assert_close(by_file.encode_image(pictures), video, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("rule", ["mean", pytest.param("zero", marks=pytest.mark.nightly)])
def test_clip_model_computes_what_the_run_does(run: Path, tmp_path: Path, rule: str) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "exported"
    assert train("export", run, "--format", "hf", "--out", out, "--frame-embedding", rule) == 0
    model, told = transformers.CLIPModel.from_pretrained(out, output_loading_info=True)
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    pictures, ids, video, text = picture_features(run, rule=rule)
    with torch.no_grad():
        seen = model.eval()(input_ids=ids, pixel_values=pictures)
    torch.testing.assert_close(seen.image_embeds, torch.nn.functional.normalize(video), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(seen.text_embeds, torch.nn.functional.normalize(text), atol=2e-5, rtol=1e-4)


# Texts that open_clip cleans, and words that its vocabulary splits.
TEXTS = (
    *("a red circle moves left", "#C C cuts the onion, isn't it?", "  A LOT   of space ", "naïve 42", "", " "),
    *(
        "“curly” ‘quotes’",
        "it’s ‚late‛ „so“",
        "&amp; &lt;b&gt; &quot;x&quot; &#39;s &#x27;S",
        "&amp;amp;lt; &copy 2024 AT&T",
    ),
    *(
        "&ldquo;hi&rdquo; &eacute; &EACUTE; &hellip; &nbsp;",
        "&#8217; &#x2019; &#128512; &#65;",
        "&checkmark; &notin; &notit;",
    ),
    *("ＦＵＬＬ　ｗｉｄｔｈ", "ｶﾞｷﾞ Ｕﾀｰﾝ", "ﬁne ﬂow ﬆ ﬃ Ǆ Ĳ ŉ", "\ufeffBOM", "a\ufeffb"),
    *("emoji 😀 👩‍👩‍👧 🏴󠁧󠁢󠁥󠁮󠁧󠁿", "e\u0301 a\u030a n\u0303 combining", "x\u00adx \u200b \u200d", "½ ² ① №"),
    *("a\x00b\x07c\x7f", "\x1b[31mred\x1b[0m", "\x93q\x94 \x85", "a\u2028b\u2029c\u00a0d\u202fe", "a\r\nb\tc\x0bd\x0c"),
    *(
        "ΟΔΟΣ ΣΟΦΟΣ. ΑΣ",
        "İstanbul ß ẞ Å",
        "Привет МИР",
        "日本語 テキスト",
        "مرحبا ﷺ",
        "don't DON'T WE'LL",
        "!!! ?? ...",
    ),
    *("<|endoftext|> <|startoftext|>", "a <end_of_text> b", "\u206a\ufffc\ufff9", "ſt 'ſ K", "word " * 100),
)


def test_the_tokenizer_of_transformers_gives_the_ids_that_the_run_saw(run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    messages: list[str] = []
    export_run(run, form="hf", out=tmp_path / "exported", say=messages.append)
    assert [line for line in messages if "does not repair text decoded with the wrong encoding" in line]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    tokenize = load_tokenizer()
    for text in TEXTS:
        theirs = tokenizer(text, padding="max_length", truncation=True)["input_ids"]
        ours = tokenize(text)
        length = int((ours != 0).sum())
        if "end_of_text" not in text:
            assert int(ours.argmax()) + 1 == length
        assert theirs[:length] == ours[:length].tolist() and set(theirs[length:]) <= {49407}, text
    # Among all letters, only those that are newer than Python's Unicode tables differ.
    letters = [chr(point) for point in range(1, 0x20000, 149) if not 0xD800 <= point < 0xE000]
    rows = tokenizer([f"a {letter} b" for letter in letters])["input_ids"]
    differ = [
        letter
        for letter, row in zip(letters, rows, strict=True)
        if row != tokenize(f"a {letter} b")[: len(row)].tolist()
    ]
    assert all(unicodedata.category(letter) == "Cn" for letter in differ) and len(differ) < 4
    # Texts that replacements cannot express, as docs/weights.md states.
    clip = transformers.CLIPTokenizer.from_pretrained(tmp_path / "exported")
    for text in ("schÃ¶n", "<b>&ldquo;x&rdquo;</b>", "&#1234;", "&ampamp;", "ΟΔΟΣ", "ＦＵＬＬ"):
        ours = tokenize(text)
        clean = html.unescape(html.unescape(ftfy.fix_text(text))).lower()
        assert clip(clean)["input_ids"] == ours[: int((ours != 0).sum())].tolist(), text
    assert tokenizer.decode(tokenizer("a naïve café")["input_ids"], skip_special_tokens=True) == "a naïve café"
    processor = transformers.CLIPImageProcessor.from_pretrained(tmp_path / "exported")
    assert list(processor.image_mean) == [0.42, 0.46, 0.41] and processor.crop_size["height"] == SIDE


def test_a_run_itself_is_a_start_with_more_frames(run: Path) -> None:
    source = open_weights(Init(weights=str(run)))
    assert source is not None and source.title.endswith("(step 2 of a run)")
    facts = source.facts
    assert (facts.activation, facts.video_eps, facts.mean) == ("quick_gelu", 1e-6, (0.42, 0.46, 0.41))
    model = model_of(run, num_frames=4)
    loaded = loaded_weights(model, source, say=ignore_line)
    (change,) = loaded.fitted.changes
    assert (change.kind, change.name, change.old, change.new) == (
        "resized",
        "video.temporal_embedding",
        (2, 128),
        (4, 128),
    )
    assert loaded.logit_scale == pytest.approx(-torch.tensor(0.07).log().item(), rel=1e-2)
    expected = weights_of(run)
    same = [name for name, tensor in model.state_dict().items() if torch.equal(tensor, expected[name])]
    assert len(same) == len(expected) - 1


def test_extras_of_other_weights_are_refused(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    export_run(run, form="hf", out=out, say=ignore_line)
    state = load_file(out / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in state.items()}, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"does not belong to model.safetensors") as caught:
        open_weights(Init(weights=str(out)))
    assert "delete video_extras.safetensors" in str(caught.value.hint)


def test_the_user_hears_what_is_lost(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("export", run, "--format", "open_clip", "--out", tmp_path / "exported") == 0
    printed = capsys.readouterr().out
    assert "an image tower cannot use the temporal embedding of 2 steps: its mean is added" in printed
    assert "kept in video_extras.safetensors" in printed


def test_cubes_of_several_frames_become_patches_of_equal_frames() -> None:
    size = replace(size_of("tiny", Towers(tubelet=2)))
    cubes = DualEncoder(size, image_px=SIDE, num_frames=2, attend=attend_with_sdpa).eval()
    towers = image_towers(cubes.state_dict(), rule="mean")
    assert (
        any("cubes of 2 frames" in message for message in towers.limitations) and "video.conv1.weight" in towers.extras
    )
    patches = DualEncoder(size_of("tiny", Towers()), image_px=SIDE, num_frames=1, attend=attend_with_sdpa).eval()
    patches.load_state_dict({**towers.tensors, "video.temporal_embedding": torch.zeros(1, 128)})
    picture = torch.randn(2, 3, 1, SIDE, SIDE)
    with torch.no_grad():
        torch.testing.assert_close(patches.video(picture), cubes.video(picture.expand(-1, -1, 2, -1, -1)))


def test_mistakes_have_two_lines_and_leave_nothing_behind(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("x")
    for arguments, error in (
        ([tmp_path / "none", "--out", tmp_path / "a"], "there is no run in"),
        ([run, "--out", full], "exists already"),
        ([run, "--out", tmp_path / "a", "--checkpoint", tmp_path / "step_000009"], "is not a checkpoint of"),
        ([run, "--out", full / "precious" / "a"], "cannot write"),
    ):
        assert train("export", *arguments, "--format", "open_clip") == 2
        printed = capsys.readouterr().err.splitlines()
        assert len(printed) == 2 and error in printed[0] and printed[1].startswith("hint: "), printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_a_model_without_a_text_tower_or_of_latents_is_no_clip(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    whole = our_model().state_dict()
    without_text = {name: tensor for name, tensor in whole.items() if not name.startswith("text.")}
    of_latents = {**whole, "video.conv1.weight": torch.zeros(64, 4, 2, 2)}
    for weights, error in ((without_text, "no text tower"), (of_latents, "latents with 4 channels")):
        monkeypatch.setattr("clipmill.train.weights.sources.complete_weights", lambda path, weights=weights: weights)
        with pytest.raises(UserError, match=error):
            export_run(run, form="hf", out=run / "exported", say=ignore_line)


def test_weights_that_are_not_finite_are_not_exported(run: Path, tmp_path: Path) -> None:
    """An older version may have saved such weights."""
    run_copy = tmp_path / "run"
    shutil.copytree(run, run_copy)
    path = latest_checkpoint(run_copy / "checkpoints")
    assert path is not None
    facts = read_metadata(path)
    weights = {f"model.{name}": tensor for name, tensor in read_weights(path).items()}
    for name in ("video.proj", "objective.logit_scale"):
        poisoned = weights | {"objective.logit_scale": torch.tensor(1.0)}
        poisoned = {
            key: torch.full_like(tensor, torch.nan) if key.endswith(name) else tensor
            for key, tensor in poisoned.items()
        }
        writer = CheckpointWriter(run_copy / "checkpoints", world=World(), keep=9, best=None)
        writer.save(poisoned, replace(facts, step=facts.step + len(name)))
        writer.close()
        with pytest.raises(UserError, match=rf"step_.*{name} contains non-finite values"):
            export_run(run_copy, form="open_clip", out=tmp_path / "out", say=ignore_line)
        assert not (tmp_path / "out").exists()
