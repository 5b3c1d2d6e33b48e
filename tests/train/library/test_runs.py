"""Towers from libraries in runs: they support everything that other towers support."""

import json
from pathlib import Path

import numpy as np
import open_clip
import pytest
import timm
import torch

from clipmill.train.inference import LoadedModel, load_model
from clipmill.train.models.dual_encoder import DualEncoder
from tests.train.library.conftest import TINY, TOWERS
from tests.train.library.small_library import PX, RESNET, SIGLIP2, save_hf
from tests.train.running import facts, losses, train
from tests.train.tuning.runs import kill_copy, latest, stored_names, weights

CLIPS = np.random.default_rng(0).integers(0, 256, (3, 2, PX, PX, 3), dtype=np.uint8)
TEXTS = ["a dog catches a frisbee", "two people talk"]


def encoder(model: LoadedModel) -> DualEncoder:
    assert isinstance(model.model, DualEncoder)
    return model.model


def test_a_run_starts_from_all_weights_of_its_library(siglip2: Path, run: Path) -> None:
    loaded = facts(run)["weights"]
    state = torch.load(siglip2)
    assert loaded["num_copied"] == len(state) - 2  # all except logit_scale and logit_bias
    created = {change["name"] for change in loaded["changes"]}
    assert created and all(name.startswith(("video.pool.", "video.temporal_embedding")) for name in created)
    start = {
        "visual.trunk.pos_embed": "video.model.trunk.pos_embed",
        "text.ln_final.weight": "text.model.ln_final.weight",
    }
    for theirs, ours in start.items():
        assert (weights(run)[ours] - state[theirs]).abs().max() < 0.01


def test_it_is_resumed_evaluated_embedded_and_loaded(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = kill_copy(run, tmp_path / "again")
    assert train("dual-encoder", "--resume", "--out", again) == 0
    assert losses(again) == losses(run)
    resumed = weights(again)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in weights(run).items())
    capsys.readouterr()
    assert train("eval", "retrieval", run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["text_to_video"]["num_queries"] > 0
    assert train("eval", "probe", run, "--split", "val", "--label", "verb") != 0  # the data have no labels
    model = load_model(run, device="cpu")
    video, text = model.encode_video(CLIPS), model.encode_text(TEXTS)
    assert video.shape == (3, 32) and text.shape == (2, 32)
    assert model.encode_video(CLIPS, tokens=True).shape == (3, 2 * 16, 32)


def test_an_export_is_what_open_clip_loads_and_what_clipmill_loads(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    assert train("export", run, "--format", "open_clip", "--out", out) == 0
    theirs = open_clip.create_model(f"local-dir:{out}").eval()
    ours = load_model(run, device="cpu")
    tokens = torch.from_numpy(np.stack([encoder(ours).tokenize(text) for text in TEXTS]))
    frames = torch.randn(2, 3, PX, PX)
    with torch.no_grad():
        embeddings = theirs.encode_image(frames, normalize=True), theirs.encode_text(tokens, normalize=True)
        clips = encoder(ours).embed_video(frames[:, :, None].expand(-1, -1, 2, -1, -1))
        torch.testing.assert_close(clips, embeddings[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(encoder(ours).embed_text(tokens), embeddings[1], rtol=0, atol=1e-5)
    back = load_model(out, device="cpu")
    assert back.identity == ours.identity
    assert torch.equal(back.encode_video(CLIPS), ours.encode_video(CLIPS))


@pytest.mark.parametrize("name", [RESNET, SIGLIP2])
def test_a_name_and_tag_opens_towers_that_open_clip_has_to_build(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    torch.manual_seed(4)
    theirs = open_clip.create_model(name, precision="fp32").eval()
    torch.save(theirs.state_dict(), tmp_path / "cached.pt")
    entry = {"hf_hub": "test/", "mean": (0.4, 0.5, 0.6), "std": (0.3, 0.3, 0.3)}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, name, {"some": entry})
    monkeypatch.setattr("open_clip.pretrained.download_pretrained", lambda entry: str(tmp_path / "cached.pt"))
    ours = load_model(f"{name}:some", device="cpu")
    assert (ours.settings.size_px, ours.settings.num_frames) == (PX, 4)
    assert ours.settings.init.pixel_mean == pytest.approx(entry["mean"])
    assert any("the mean over its 4 frames" in remark for remark in ours.remarks)
    assert not any("activation" in remark for remark in ours.remarks)
    frames = torch.randn(2, 3, PX, PX)
    tokens = torch.from_numpy(np.stack([encoder(ours).tokenize(text) for text in TEXTS]))
    with torch.no_grad():
        clips = ours.encode_video(frames[:, :, None].expand(-1, -1, 4, -1, -1))
        torch.testing.assert_close(clips, theirs.encode_image(frames, normalize=True), rtol=0, atol=1e-5)
        texts = theirs.encode_text(tokens, normalize=True)
        torch.testing.assert_close(ours.encode_text(TEXTS), texts, rtol=0, atol=1e-5)


def test_adapters_of_peft_are_trained_and_merged(data_dir: Path, siglip2: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapted"
    flags = ("--lora.rank", 2, "--lora.alpha", 4, "--steps", 3, "--checkpoint-every", 1, "--lr", "1e-2")
    given = (*TINY, *TOWERS, *flags, "--init.weights", siglip2, "--shards", data_dir)
    assert train("dual-encoder", *given, "--out", out) == 0
    names = stored_names(out, "model.")
    assert names and all(".lora_" in name for name in names), sorted(names)[:5]
    assert any("attn.out_proj.lora_A" in name for name in names) and any(".mlp." in name for name in names)
    again = kill_copy(out, tmp_path / "again")
    assert train("dual-encoder", "--resume", "--out", again) == 0
    assert losses(again) == losses(out)
    before, after = torch.load(siglip2), weights(out)
    moved = [
        name for name, tensor in before.items() if name.startswith("visual.trunk.blocks") and name.endswith("weight")
    ]
    changed = [name for name in moved if not torch.equal(before[name], after[f"video.model.{name[7:]}"])]
    assert len(changed) == 2 * 4  # two blocks with four linear layers
    assert load_model(out, device="cpu").encode_video(CLIPS).isfinite().all()


@pytest.mark.nightly
def test_parts_are_frozen_and_a_resnet_keeps_its_statistics(data_dir: Path, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "frozen"
    flags = ("--towers.image", f"open_clip:{RESNET}", "--freeze", "text.blocks:1", "--steps", 2, "--lr", "1e-2")
    assert train("dual-encoder", *TINY, *flags, "--shards", data_dir, "--out", out) == 0
    after = weights(out)
    assert after["video.model.bn1.running_mean"].abs().sum() > 0
    assert "are frozen" not in facts(out)["parameters"] and "text.blocks:1" in facts(out)["parameters"]
    exported = tmp_path / "exported"
    assert train("export", out, "--format", "open_clip", "--out", exported) == 0
    theirs = open_clip.create_model(f"local-dir:{exported}").eval()
    assert torch.equal(theirs.visual.bn1.running_mean, after["video.model.bn1.running_mean"])
    assert load_model(exported, device="cpu").identity == load_model(out, device="cpu").identity
    words = ("dual-encoder", *TINY, "--steps", 1, "--shards", data_dir, "--init.weights", out)
    assert train(*words, "--out", tmp_path / "continued") == 0
    assert "open_clip" in (tmp_path / "continued" / "settings.yaml").read_text()


@pytest.mark.nightly
def test_towers_of_timm_and_of_transformers_go_back_to_their_libraries(data_dir: Path, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    save_hf(hf, "clip")
    for name, image, texts in (("timm", "timm:tiny_pe", ()), ("hf", f"hf:{hf}", ("--towers.text", f"hf:{hf}"))):
        out, exported = tmp_path / f"run-{name}", tmp_path / f"exported-{name}"
        flags = ("--towers.image", image, *texts, "--steps", 1, "--lr", "1e-3")
        assert train("dual-encoder", *TINY, *flags, "--shards", data_dir, "--out", out) == 0
        assert train("export", out, "--format", name, "--out", exported) == 0
        ours = load_model(out, device="cpu")
        frames = torch.randn(2, 3, PX, PX)
        with torch.no_grad():
            if name == "timm":
                features = timm.create_model(f"local-dir:{exported}", pretrained=True).eval()(frames)
            else:
                from transformers import AutoModel

                features = AutoModel.from_pretrained(exported).eval().get_image_features(frames).pooler_output
            clips = encoder(ours).embed_video(frames[:, :, None].expand(-1, -1, 2, -1, -1))
        torch.testing.assert_close(clips, torch.nn.functional.normalize(features, dim=-1), rtol=0, atol=1e-5)
        back = load_model(exported, device="cpu")
        assert back.identity == ours.identity, name
        assert torch.equal(back.encode_text(TEXTS), ours.encode_text(TEXTS))


def test_other_tasks_take_the_image_tower_of_a_run(data_dir: Path, run: Path, tmp_path: Path) -> None:
    words = tmp_path / "captions"
    decoder = ("--decoder.name", "tiny", "--decoder.depth", 1, "--decoder.vocabulary", 280, "--decoder.max-tokens", 8)
    some = (*TINY, "--steps", 1, "--lr", "1e-3", "--shards", data_dir, "--init.weights", run)
    assert train("caption", *some, *decoder, "--out", words) == 0
    before, after = weights(run), weights(words)
    name = "video.model.trunk.blocks.0.attn.qkv.weight"
    assert (before[name] - after[name]).abs().max() < 0.01
    assert latest(words)


def test_an_encoder_of_pictures_and_one_of_texts_are_paired(data_dir: Path, tmp_path: Path) -> None:
    """DINOv2's files and modules use different names, which the loader of transformers converts."""
    theirs, of_text = save_hf(tmp_path / "dino", "dinov2"), save_hf(tmp_path / "bert", "bert")
    towers = ("--towers.image", f"hf:{tmp_path / 'dino'}", "--towers.text", f"hf:{tmp_path / 'bert'}")
    some = ("--towers.text-pooling", "mean", "--towers.activation-checkpointing", "--steps", 1, "--lr", "1e-12")
    given = ("--init.weights", tmp_path / "dino", "--init.text", tmp_path / "bert", "--shards", data_dir)
    assert train("dual-encoder", *TINY, *towers, *some, *given, "--out", tmp_path / "run") == 0
    after = weights(tmp_path / "run")
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(after[f"video.model.{name}"], tensor, rtol=0, atol=1e-9)
    for name, tensor in of_text.state_dict().items():
        torch.testing.assert_close(after[f"text.model.{name}"], tensor, rtol=0, atol=1e-9)
    assert train("export", tmp_path / "run", "--format", "hf", "--out", tmp_path / "out") == 0
    assert load_model(tmp_path / "out").identity == load_model(tmp_path / "run").identity


REFUSED = [
    (
        ("--towers.image", "open_clip:RN51"),
        "open_clip has no tower open_clip:RN51",
        "similar names: RN50, RN50x16, RN101",
    ),
    (("--towers.image", "timm:vit_base_patch16_siglip_22"), "timm has no tower", "vit_base_patch16_siglip_224"),
    (
        ("--towers.image", "torchvision:resnet18"),
        "--towers.image torchvision:resnet18 does not name a tower",
        "open_clip:NAME",
    ),
    (("--towers.image", f"open_clip:{SIGLIP2}", "--size-px", 48), "--size-px is 48", "use --size-px 32"),
    (("--towers.image", f"open_clip:{SIGLIP2}", "--towers.width", 64), "--towers.width is 64", "omit"),
    (("--towers.text", "timm:resnet10t"), "--towers.text is timm:resnet10t", "open_clip"),
    (
        ("--towers.attention", "divided", "--towers.image", f"open_clip:{RESNET}"),
        "--towers.attention is divided, but",
        "omit",
    ),
    (
        ("--towers.text", "hf:nowhere/nothing"),
        "the configuration of hf:nowhere/nothing is neither cached",
        "hf download",
    ),
    (("--towers.image", "hf:/nowhere"), "the configuration of hf:/nowhere cannot be read", "use a folder"),
    (("--towers.image", "timm:local-dir:/nowhere"), "timm:local-dir:/nowhere: ", "use a folder"),
    (("--towers.image", "open_clip:local-dir:/nowhere"), "no readable open_clip_config.json", "use a folder"),
    (("--towers.pool-frames", "attention"), "--towers.image is not set", "use --towers.image\n"),
]


@pytest.mark.parametrize(("flags", "error", "hint"), REFUSED)
def test_what_cannot_be_is_refused(
    data_dir: Path,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[object, ...],
    error: str,
    hint: str,
) -> None:
    out = tmp_path / "out"
    assert train("dual-encoder", *TINY, *flags, "--steps", 1, "--shards", data_dir, "--out", out) == 2
    stderr = capsys.readouterr().err
    assert error in stderr and hint in stderr and not out.exists()


def test_a_missing_tokenizer_and_weights_of_another_tower_are_refused(
    data_dir: Path, siglip2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_hf(tmp_path / "hf", "siglip")
    for file in (tmp_path / "hf").glob("tokenizer*"):
        file.unlink()
    some = ("dual-encoder", *TINY, "--steps", 1, "--shards", data_dir, "--out", tmp_path / "out")
    assert train(*some, "--towers.text", f"hf:{tmp_path / 'hf'}") == 2
    stderr = capsys.readouterr().err
    assert f"the tokenizer of hf:{tmp_path / 'hf'} cannot be read: " in stderr and "has no tokenizer.json" in stderr
    assert train(*some, "--towers.image", f"open_clip:{RESNET}", "--init.weights", siglip2) == 2
    stderr = capsys.readouterr().err
    assert f"open_clip:{RESNET}" in stderr and "does not fit the model" in stderr and "unexpected" in stderr
