"""`train caption` from the command line: three kinds of towers, decoders from folders, and exports for transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.train.config.files import load_settings
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.captioner import Captioner
from clipmill.train.run.folder import RunFolder
from clipmill.train.tasks.caption.decoding import generate_captions as captions_of
from clipmill.train.tasks.caption.model import build_captioner, decoder_size_of, read_decoder_parts
from clipmill.train.tasks.caption.spec import CaptionerSettings, DecodingSettings
from clipmill.train.tasks.caption.tokenizer import train_tokenizer
from tests.train.caption.test_tokenizer import ONE_TOKEN
from tests.train.running import facts, losses, train, weights_of
from tests.train.tiny_data import Caption, write_captions

SMALL = "--model tiny --size-px 32 --num-frames 2 --workers 1 --batch 4 --lr 1e-3 --warmup-steps 2 --device cpu"
DECODER = "--decoder.name tiny --decoder.depth 1 --decoder.max-tokens 12 --decoder.vocabulary 280"
TINY = (*SMALL.split(), *DECODER.split())


@pytest.fixture(scope="module")
def run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of six steps."""

    out = tmp_path_factory.mktemp("captions") / "run"
    flags = ("--steps", 6, "--captions-per-visit", 2, "--decoder.dropout", 0.1)
    assert train("caption", "--shards", data_dir, "--out", out, *TINY, *flags) == 0
    return out


def message_of(capsys: pytest.CaptureFixture[str]) -> str:
    return next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))


def test_a_run_learns(run: Path) -> None:
    assert losses(run)[-1] < losses(run)[0]


def test_parts_of_a_batch_give_the_same_losses(run: Path, data_dir: Path, tmp_path: Path) -> None:
    for name, microbatch in (("whole", 4), ("parts", 2)):
        flags = ("--steps", 3, "--microbatch", microbatch, "--captions-per-visit", 2)
        assert train("caption", "--shards", data_dir, "--out", tmp_path / name, *TINY, *flags) == 0
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_transformers_open_an_export_and_it_comes_back_bit_by_bit(run: Path, data_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, VisionEncoderDecoderModel

    folder, back = tmp_path / "folder", tmp_path / "back"
    assert train("export", run, "--format", "hf", "--out", folder) == 0
    theirs = VisionEncoderDecoderModel.from_pretrained(folder)
    ours = read_decoder_parts(RunFolder(run))
    tokens = AutoTokenizer.from_pretrained(folder)
    assert tokens("the middle of a")["input_ids"] == ours.tokenizer.ids("the middle of a")
    assert theirs.config.decoder_start_token_id == ours.tokenizer.end_id
    # The exported model writes the same captions as the run, with the same maximum length. The context of this run is
    # shorter than the default of 30.
    assert theirs.generation_config.max_new_tokens == ours.size.context_length == 12
    captioner = build_captioner(
        load_settings(RunFolder(run).settings, CaptionerSettings), ours, attend=attend_with_sdpa
    )
    assert isinstance(captioner, Captioner)
    captioner.load_state_dict(weights_of(run))
    video = torch.randn(2, 3, 2, 32, 32, generator=torch.Generator().manual_seed(0))
    end_id, decoding = ours.tokenizer.end_id, DecodingSettings(max_tokens=12)
    written = captions_of(captioner.eval(), video, decoding, end_id=end_id, samples=range(2)).tokens_VL
    assert theirs.eval().generate(video.transpose(1, 2))[:, 1:].tolist() == written.tolist()
    # A run that starts from the complete export takes over the decoder, its size and its tokens.
    decoder = ("--init.weights", folder)
    still = (*SMALL.replace("--lr 1e-3", "--lr 1e-12").split(), "--steps", 1)
    assert train("caption", "--shards", data_dir, "--out", back, *still, *decoder) == 0
    assert facts(back)["decoder"] == facts(run)["decoder"]
    assert (back / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    before = weights_of(run)
    for name, tensor in weights_of(back).items():
        torch.testing.assert_close(tensor, before[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize("task", [pytest.param("dual-encoder", marks=pytest.mark.nightly), "mae", "caption"])
def test_a_tower_of_any_run_sees_for_a_captioner(
    run: Path, data_dir: Path, tmp_path: Path, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = run
    if task != "caption":
        source = tmp_path / "source"
        flags = ("--mask-ratio", 0.5, "--sampling", "uniform") if task == "mae" else ()
        assert train(task, "--shards", data_dir, "--out", source, *SMALL.split(), *flags, "--steps", 1) == 0
    frozen = ("--freeze", "encoder", "--steps", 2, "--init.weights", source)
    decoder = DECODER.split() if task != "caption" else ()
    # The preset sets these values for any kind of tower.
    preset = tmp_path / "preset.yaml"
    preset.write_text("towers:\n  temporal: random\n")
    words = (*SMALL.split(), *decoder, *frozen, "--config", preset)
    assert train("caption", "--shards", data_dir, "--out", tmp_path / "run", *words) == 0
    before, after = weights_of(source), weights_of(tmp_path / "run")
    tower = [name for name in after if name.startswith("video.")]
    assert len(tower) > 20 and all(torch.equal(after[name], before[name]) for name in tower)
    if task == "caption":
        assert not torch.equal(after["decoder.ln_final.weight"], before["decoder.ln_final.weight"])
    kinds = {"dual-encoder": "clip", "mae": "videomae", "caption": "timesformer"}
    settings = (tmp_path / "run" / "settings.yaml").read_text()
    assert f"kind: {kinds[task]}" in settings and ("temporal: zero" in settings) == (task == "mae")
    if task == "mae":
        new = (*SMALL.split(), *decoder, "--config", preset, "--towers.kind", "videomae", "--steps", 1)
        assert train("caption", "--shards", data_dir, "--out", tmp_path / "new", *new) == 0
        assert "temporal: zero" in (tmp_path / "new" / "settings.yaml").read_text()


@pytest.fixture(scope="module")
def other_tokens(tmp_path_factory: pytest.TempPathFactory, run: Path) -> Path:
    """Tokenizer trained on other captions than the run's, with the same number of tokens."""
    folder = tmp_path_factory.mktemp("tokens")
    size = facts(run)["decoder"]["vocabulary"]
    texts = [f"{letter}{other} zebras wade through quick rivers" for letter in "qxyz" for other in "jkvw"]
    tokenizer = train_tokenizer(texts, vocabulary_size=size)
    assert tokenizer.vocabulary_size == size
    (folder / "tokenizer.json").write_bytes(tokenizer.as_json())
    return folder


def test_tokens_come_with_the_decoder_whatever_the_new_captions_are(
    run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = tmp_path / "data"
    shutil.copytree(data_dir, others)
    videos = {"a": "train", "b": "train", "c": "train", "d": "val"}
    texts = [f"{letter}{other} zebras wade through quick rivers" for letter in "qxyz" for other in "jkvw"]
    captions = [Caption(video, begin_s, begin_s + 1, text) for video in videos for begin_s in (0, 2) for text in texts]
    write_captions(others, videos, captions)
    tokenizer_file = (run / "tokenizer.json").read_bytes()
    for name, named in (("plain", ()), ("named", ("--decoder.tokenizer", run))):
        out = tmp_path / name
        flags = ("--steps", 1, "--init.weights", run, *named)
        assert train("caption", "--shards", others, "--out", out, *SMALL.split(), *flags) == 0
        assert (out / "tokenizer.json").read_bytes() == tokenizer_file
        assert facts(out)["decoder"] == facts(run)["decoder"]
    assert "--decoder.max-tokens is 12, the context length of the decoder" in capsys.readouterr().out
    assert "max_tokens: 12" in (tmp_path / "plain" / "settings.yaml").read_text()


def test_what_contradicts_the_decoder_of_the_start_is_refused(
    run: Path,
    other_tokens: Path,
    data_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, bare = tmp_path / "folder", tmp_path / "bare"
    assert train("export", run, "--format", "hf", "--out", folder) == 0
    shutil.copytree(folder, bare)
    (bare / "tokenizer.json").unlink()
    file = folder / "model.safetensors"
    capsys.readouterr()
    wrong: list[tuple[tuple[object, ...], str, str]] = [
        ((run, "--decoder.tokenizer", other_tokens), "differ from the tokens that the decoder of", "omit --dec"),
        ((folder, "--decoder.tokenizer", other_tokens), "differ from the tokens that the decoder of", "omit --dec"),
        ((bare,), "has a decoder, but no tokenizer", "--decoder.tokenizer FOLDER"),
        ((file,), "has a decoder, but no tokenizer", "--decoder.tokenizer FOLDER"),
        ((file, "--decoder.tokenizer", run), "decoder with width 128 and 1 block", "--decoder.depth 1 --decoder.max-"),
        ((run, "--decoder.weights", folder), "two decoders are selected", "omit --decoder.weights"),
        ((file, "--decoder.weights", folder), "two decoders are selected", "omit --decoder.weights"),
        ((run, "--decoder.depth", 2), "--decoder.depth is 2, but the decoder of", "omit it"),
        ((run, "--decoder.max-tokens", 13), "--decoder.max-tokens is 13, but the decoder of", "or less"),
        ((run, "--decoder.vocabulary", 300), "--decoder.vocabulary is 300, which has no effect", "omit it"),
        ((folder, "--decoder.name", "tiny"), "--decoder.name is tiny, which has no effect", "omit it"),
    ]
    for (weights, *flags), message, hint in wrong:
        words = (*SMALL.split(), "--out", tmp_path / "no", "--init.weights", weights, *flags)
        assert train("caption", "--shards", data_dir, *words, "--steps", 1) == 2
        stderr = capsys.readouterr().err
        assert message in stderr and hint in stderr, (flags, stderr)
        assert not (tmp_path / "no").exists()
    # The same tokens are accepted if `--decoder.tokenizer` names them.
    named = ("--init.weights", bare, "--decoder.tokenizer", run, "--steps", 1)
    assert train("caption", "--shards", data_dir, "--out", tmp_path / "named", *SMALL.split(), *named) == 0
    assert facts(tmp_path / "named")["decoder"] == facts(run)["decoder"]


def test_a_decoder_whose_tokenizer_has_one_token_is_refused_before_a_run_begins(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder, out = tmp_path / "gpt2", tmp_path / "run"
    GPT2LMHeadModel(GPT2Config(vocab_size=1, n_positions=16, n_embd=32, n_layer=1, n_head=2)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(ONE_TOKEN)
    decoder = ("--decoder.weights", folder, "--decoder.max-tokens", 8)
    assert train("caption", "--shards", data_dir, "--out", out, *SMALL.split(), *decoder, "--steps", 2) == 2
    assert "has no tokens for 62 of 62 letters and digits" in capsys.readouterr().err and not out.exists()


def test_a_decoder_that_has_only_read_gets_new_cross_attention(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder, out = tmp_path / "gpt2", tmp_path / "run"
    tokenizer = train_tokenizer(["a caption", "another"], vocabulary_size=270)
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "vocab_size": tokenizer.vocabulary_size,
        "n_positions": 16,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
    }
    config = GPT2Config(**size, layer_norm_epsilon=1e-3)
    theirs = GPT2LMHeadModel(config)
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer.as_json())
    decoder = ("--decoder.weights", folder, "--decoder.max-tokens", 8, "--freeze", "decoder-except-cross-attention")
    assert train("caption", "--shards", data_dir, "--out", out, *SMALL.split(), *decoder, "--steps", 2) == 0
    weights = weights_of(out)
    assert torch.equal(weights["decoder.token_embedding.weight"], theirs.transformer.wte.weight)
    second = theirs.get_parameter("transformer.h.1.mlp.c_fc.weight")
    assert torch.equal(weights["decoder.transformer.resblocks.1.mlp.c_fc.weight"], second.T)
    # The log, the page and run.json list the tensors that are copied, new and frozen, even after the run is resumed.
    printed = capsys.readouterr().out
    new = [name for name in weights if ".cross_attn." in name or ".ln_cross." in name]
    of_decoder = [name for name in weights if name.startswith("decoder.")]
    num_copied = len(of_decoder) - len(new)
    copied = f"{folder}: {num_copied} of {len(of_decoder)} tensors copied unchanged, {len(new)} are new"
    assert new and f"decoder: {copied} (cross-attention)\n" in printed
    num_frozen = sum(weights[name].numel() for name in of_decoder if name not in new)
    total = sum(tensor.numel() for tensor in weights.values())
    message = f"{total:,}, {num_frozen:,} of them frozen (decoder-except-cross-attention)"
    assert f"parameters: {message}\n" in printed
    assert train("caption", "--out", out, "--resume") == 0
    start = facts(out)["decoder_weights"]
    assert (start["source"], start["num_copied"]) == (str(folder), num_copied) and facts(out)["parameters"] == message
    assert sorted(change["name"] for change in start["changes"]) == sorted(new)
    assert decoder_size_of(RunFolder(out)).trunk.norm_eps == 1e-3
    assert f"{folder}: {num_copied} tensors copied unchanged" in (out / "index.html").read_text()
    # The tokenizer has tokens that the decoder does not know.
    config.vocab_size = tokenizer.vocabulary_size - 1
    GPT2LMHeadModel(config).save_pretrained(folder)
    assert train("caption", "--shards", data_dir, "--out", tmp_path / "no", *SMALL.split(), *decoder) == 2
    err = capsys.readouterr().err
    assert "they do not belong together" in err and "omit --decoder.tokenizer" not in err
    named = (*decoder, "--decoder.tokenizer", folder)
    assert train("caption", "--shards", data_dir, "--out", tmp_path / "no", *SMALL.split(), *named) == 2
    assert "omit --decoder.tokenizer" in capsys.readouterr().err
    # The number of heads does not divide the width.
    message = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**message, "n_head": 5}))
    assert train("caption", "--shards", data_dir, "--out", tmp_path / "no", *SMALL.split(), *decoder) == 2
    assert "n_embd 32 is not a multiple of n_head 5" in message_of(capsys)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--decoder.weights", "/nowhere/gpt2"), "there is no folder /nowhere/gpt2"),
        (("--decoder.weights", "."), "there is no tokenizer in ."),
        (("--decoder.tokenizer", "/nowhere"), "there is no tokenizer in /nowhere"),
        (("--decoder.heads", "3"), "--decoder.width 128 is not a multiple of"),
        (("--towers.heads", "3"), "--towers.width 128 is not a multiple of"),
        (("--towers.patch-px", "9"), "--size-px 32 is not a multiple of 9"),
        (("--freeze", "encoder", "decoder"), "leaves nothing to train"),
        (("--captions.min-relevancy", "0.5"), "which do not describe the sampled clip"),
        (("--evaluate.every", "1", "--evaluate.split", "test"), "no videos of split 'test'"),
        (("--input", "latents"), "--input"),
        (("--decoding.max-tokens", "30"), "--decoding.max-tokens is 30, but the decoder's context has 12 tokens"),
        (("--captions-per-visit", "0"), "--captions-per-visit is 0"),
    ],
)
def test_what_cannot_be_is_said_and_leaves_nothing_behind(
    data_dir: Path,
    tmp_path: Path,
    flags: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = dict(zip(TINY[::2], TINY[1::2], strict=True))
    if flags[0] in ("--decoder.weights", "--decoder.tokenizer"):
        given = {name: value for name, value in given.items() if name in SMALL or name == "--decoder.max-tokens"}
    words = [word for pair in given.items() for word in pair]
    assert train("caption", "--shards", data_dir, "--out", "run", *words, *flags, "--steps", 1) == 2
    assert message in message_of(capsys)
    assert not (tmp_path / "run").exists()
