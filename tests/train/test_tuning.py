"""Runs that train parts of a model: what stays as it was, what checkpoints hold, and how they are used again."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.classify.moving import write_moving
from tests.train.test_cli import train
from train.cli import main
from train.config.tuning import frozen_part
from train.data.batch import Batch
from train.distributed.world import Step, World
from train.losses.registry import build_contrast
from train.losses.settings import Loss
from train.models.attention import attend_with_sdpa
from train.models.dual_encoder import SIZES, DualEncoder
from train.optim.parameters import freeze
from train.run.checkpoint import latest_checkpoint, read_table
from train.run.folder import RunFolder, read_lines
from train.weights.sources import whole_weights

__all__ = ["train"]

Train = Callable[..., int]
TINY = ["--model", "tiny", "--num-frames", 2, "--size-px", 32, "--batch", 4, "--warmup-steps", 1, "--workers", 1]
SHORT = [*TINY, "--lr", "1e-2", "--steps", 2]
SMALL = [*TINY, "--lr", "1e-2", "--steps", 4, "--checkpoint-every", 2, "--optimizer.ema", 0.9]
LORA = ("--lora.rank", 2, "--lora.alpha", 4)
CROSS = "decoder.transformer.resblocks.0.cross_attn.kv_proj.weight"
STEM = {f"video.{name}" for name in ("class_embedding", "positional_embedding", "temporal_embedding", "conv1.weight")}


def call(*words: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
    assert not left.value.code


@pytest.fixture(scope="module")
def source(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained dual encoder."""
    out = tmp_path_factory.mktemp("source") / "run"
    flags = ("--lr", "1e-3", "--steps", 2, "--towers.temporal", "random")
    call("dual-encoder", *TINY, *flags, "--shards", data_dir, "--out", out)
    return out


@pytest.fixture(scope="module")
def adapted(data_dir: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That dual encoder with adapters in both towers."""
    out = tmp_path_factory.mktemp("adapted") / "run"
    flags = [*SMALL, *LORA, "--evaluate.every", 4, "--shards", data_dir, "--init.weights", source, "--out", out]
    call("dual-encoder", *flags)
    return out


def latest(out: Path) -> Path:
    path = latest_checkpoint(RunFolder(out).checkpoints)
    assert path is not None
    return path


def weights(out: Path) -> dict[str, torch.Tensor]:
    return whole_weights(latest(out))


def stored(out: Path, prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in read_table(latest(out)) if name.startswith(prefix)}


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_lines(RunFolder(out).metrics)]


def killed(out: Path, copy: Path) -> Path:
    """A copy of a run as it was after its first checkpoint."""
    shutil.copytree(out, copy)
    for path in sorted((copy / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    return copy


FROZEN: dict[str, tuple[Any, ...]] = {
    "video": ("--freeze", "video"),
    "text": ("--freeze", "text", "--microbatch", 2),
    "blocks": ("--freeze", "blocks:2", "text.blocks:1", "--towers.drop-path", 0.1, "--optimizer.name", "lamb"),
}


def is_frozen(name: str, case: str) -> bool:
    if case != "blocks":
        return name.startswith(f"{case}.")
    stem = (*STEM, "video.ln_pre.", "text.token_embedding.", "text.positional_embedding")
    first = ("video.transformer.resblocks.0.", "video.transformer.resblocks.1.", "text.transformer.resblocks.0.")
    return name.startswith((*stem, *first))


@pytest.mark.parametrize("case", FROZEN)
def test_frozen_parts_stay_as_they_are_to_the_bit(
    train: Train, data_dir: Path, source: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, again = tmp_path / "run", tmp_path / "again"
    flags = [*SMALL, "--shards", data_dir, "--init.weights", source, *FROZEN[case]]
    assert train("dual-encoder", *flags, "--out", out) == 0
    before, after = weights(source), weights(out)
    assert before.keys() == after.keys()
    frozen = {name for name in after if is_frozen(name, case)}
    assert {name for name in after if torch.equal(before[name], after[name])} == frozen
    total, num_frozen = (sum(after[name].numel() for name in names) for names in (after, frozen))
    said = f"{total:,}, {num_frozen:,} of them frozen ({', '.join(FROZEN[case][1 : 3 if case == 'blocks' else 2])})"
    assert f"parameters: {said}\n" in capsys.readouterr().out and RunFolder(out).read_facts()["parameters"] == said
    # Nothing is kept of a frozen tensor but itself.
    assert stored(out, "model.") == after.keys()
    assert stored(out, "ema.") == after.keys() - frozen
    assert {name.rpartition(".")[0] for name in stored(out, "optimizer.model.")} == after.keys() - frozen
    assert train("dual-encoder", "--resume", "--out", killed(out, again)) == 0
    assert losses(again) == losses(out) and all(torch.equal(weights(again)[name], one) for name, one in after.items())


def test_the_first_blocks_are_run_without_a_graph(data_dir: Path, train: Train, tmp_path: Path) -> None:
    """Nothing before the last block of either tower asks for memory or a backward pass."""
    seen: dict[str, bool] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: object, inputs: object, output: torch.Tensor) -> None:
            seen[name] = output.requires_grad

        return hook

    def watch(self: DualEncoder, *inputs: Any) -> Any:
        for name, module in self.named_modules():
            if name.endswith(("resblocks.0", "resblocks.1", "resblocks.2", "resblocks.3", "ln_pre")):
                module.register_forward_hook(note(name))
        return forward(self, *inputs)

    forward = DualEncoder.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DualEncoder, "forward", watch)
        flags = [*TINY, "--lr", "1e-3", "--steps", 1, "--shards", data_dir, "--out", tmp_path / "run"]
        assert train("dual-encoder", *flags, "--freeze", "blocks:3", "text.blocks:1") == 0
    grown = {name for name, has_graph in seen.items() if has_graph}
    assert len(seen) == 7 and grown == {"video.transformer.resblocks.3", "text.transformer.resblocks.1"}


def test_a_checkpoint_of_adapters_holds_nothing_else_and_is_resumed(
    train: Train, source: Path, adapted: Path, tmp_path: Path
) -> None:
    frozen = "(video, with adapters of rank 2, text, with adapters of rank 2)"
    assert RunFolder(adapted).read_facts()["parameters"].endswith(f"of them frozen {frozen}")
    names = stored(adapted, "model.")
    # 4 and 2 blocks with 4 matrices each, and 2 tensors for a matrix.
    assert len(names) == 6 * 4 * 2 and all(name.endswith((".lora.A", ".lora.B")) for name in names)
    assert stored(adapted, "ema.") == names == {name.rpartition(".")[0] for name in stored(adapted, "optimizer.model.")}
    size, of_source = (sum(path.stat().st_size for path in latest(run).iterdir()) for run in (adapted, source))
    assert size < of_source / 10
    before, after = weights(source), weights(adapted)
    assert before.keys() == after.keys()
    matrices = {name.rpartition(".lora.")[0] for name in names}
    merged = {name for name in after if name.removesuffix(".weight") in matrices or name.endswith("in_proj_weight")}
    assert {name for name in after if not torch.equal(before[name], after[name])} == merged and len(merged) == 24

    again = killed(adapted, tmp_path / "again")
    assert train("dual-encoder", "--resume", "--out", again) == 0
    assert losses(again) == losses(adapted)
    assert all(torch.equal(weights(again)[name], one) for name, one in after.items())


def test_adapters_are_merged_for_evaluation_export_and_a_new_start(
    train: Train, data_dir: Path, adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("eval", "retrieval", adapted, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    line = read_lines(RunFolder(adapted).metrics)[-1]
    for direction in ("text_to_video", "video_to_text"):
        scores = {f"val/{direction}_r{k}": share for k, share in result[direction]["recall"].items()}
        assert scores and {name: line[name] for name in scores} == scores
    exported, started = tmp_path / "exported", tmp_path / "started"
    assert train("export", adapted, "--format", "open_clip", "--out", exported) == 0
    still = [*TINY, "--lr", "1e-12", "--steps", 1, "--shards", data_dir]
    assert train("dual-encoder", *still, "--init.weights", exported, "--out", started) == 0
    for name, one in weights(adapted).items():
        torch.testing.assert_close(weights(started)[name], one, rtol=0, atol=1e-9)


def test_adapters_need_the_weights_that_they_adapt(
    train: Train, data_dir: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = tmp_path / "base", tmp_path / "run"
    shutil.copytree(source, base)
    flags = [*TINY, "--lr", "1e-2", "--shards", data_dir, *LORA]
    words = ("--steps", 2, "--checkpoint-every", 1, "--init.weights", base, "--out", out)
    assert train("dual-encoder", *flags, *words) == 0
    cut = killed(out, tmp_path / "cut")
    commands = (
        ("dual-encoder", "--resume", "--out", cut),
        ("eval", "retrieval", out),
        ("export", out, "--format", "open_clip", "--out", tmp_path / "exported"),
        ("dual-encoder", *flags, "--steps", 1, "--init.weights", out, "--out", tmp_path / "second"),
    )
    # The weights of a run whose text tower was trained on.
    changed = tmp_path / "changed"
    others = ("--steps", 1, "--freeze", "video", "--init.weights", base, "--out", changed)
    assert train("dual-encoder", *TINY, "--lr", "1e-2", "--shards", data_dir, *others) == 0
    for problem, folder in (
        ("holds adapters, and the weights that they adapt have changed", changed),
        ("holds adapters, and not the weights that they adapt", None),
    ):
        shutil.rmtree(base)
        if folder is not None:
            shutil.copytree(folder, base)
        for command in commands:
            capsys.readouterr()
            assert train(*command) == 2
            error, hint = capsys.readouterr().err.splitlines()[-2:]
            assert problem in error and str(base) in error
            assert hint == f"hint: put back the weights that the run started from: {base}"
    shutil.copytree(source, base)
    for command in commands[:2]:
        assert train(*command) == 0


def test_what_weights_lack_is_trained_whole_beside_the_adapters(
    train: Train, data_dir: Path, source: Path, tmp_path: Path
) -> None:
    """A new projection, and the positions of another picture size, which a rule of resizing has made."""
    out = tmp_path / "run"
    flags = [*TINY[:2], "--num-frames", 4, "--size-px", 48, *TINY[6:], "--lr", "1e-2", "--steps", 2]
    flags += ["--shards", data_dir, "--init.weights", source, *LORA, "--lora.targets", "mlp"]
    flags += ["--towers.embedding-width", 24]
    assert train("dual-encoder", *flags, "--freeze", "blocks:1", "--out", out) == 0
    names = {name for name in stored(out, "model.") if ".lora." not in name}
    resized = {"video.positional_embedding", "video.temporal_embedding"}
    assert names == {"video.proj", "text.text_projection", *resized}
    trained = {name.rpartition(".")[0] for name in stored(out, "optimizer.model.")}
    assert names - trained == resized
    adapted = {name.partition(".lora.")[0] for name in stored(out, "model.") if ".lora." in name}
    blocks = [*(f"video.transformer.resblocks.{number}" for number in (1, 2, 3)), "text.transformer.resblocks.0"]
    blocks.append("text.transformer.resblocks.1")
    assert adapted == {f"{block}.mlp.{layer}" for block in blocks for layer in ("c_fc", "c_proj")}


@pytest.fixture(scope="module")
def masked(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked autoencoder."""
    out = tmp_path_factory.mktemp("masked") / "run"
    call("mae", *SHORT, "--mask-ratio", 0.5, "--shards", data_dir, "--out", out)
    return out


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (("--freeze", "video"), ""),
        (("--freeze", "blocks:3"), r"video\.transformer\.resblocks\.3\..*"),
        ((*LORA, "--dropout", 0.1), r"video\..*(in_proj_weight|out_proj\.weight|c_fc\.weight|c_proj\.weight)"),
    ],
)
def test_a_classifier_trains_its_head_and_what_is_not_frozen(
    train: Train, masked: Path, tmp_path: Path, flags: tuple[Any, ...], changed: str
) -> None:
    moving, out = tmp_path / "moving", tmp_path / "run"
    write_moving(moving, num_videos=4)
    assert train("classify", *SHORT, "--shards", moving, "--init.weights", masked, *flags, "--out", out) == 0
    before, after = weights(masked), weights(out)
    assert {"head.weight", "fc_norm.weight"} <= after.keys() - before.keys()
    shared = before.keys() & after.keys()
    assert {name for name in shared if not torch.equal(before[name], after[name])} == {
        name for name in shared if re.fullmatch(changed, name)
    }
    if flags[:2] == LORA[:2]:
        # VideoMAE's own files have the merged encoder.
        assert train("export", out, "--format", "videomae", "--out", tmp_path / "exported") == 0
        file = torch.load(tmp_path / "exported" / "checkpoint.pth", weights_only=True)["model"]
        assert torch.equal(file["blocks.0.mlp.fc1.weight"], after["video.transformer.resblocks.0.mlp.c_fc.weight"])


def test_the_first_blocks_of_a_masked_autoencoder_are_frozen(
    train: Train, data_dir: Path, masked: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = ("--mask-ratio", 0.5, "--shards", data_dir, "--init.weights", masked, "--freeze", "blocks:2")
    assert train("mae", *SHORT, *flags, "--out", out) == 0
    before, after = weights(masked), weights(out)
    frozen = ("video.conv1.", "video.transformer.resblocks.0.", "video.transformer.resblocks.1.")
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        name for name in before if name.startswith(frozen)
    }


def test_a_captioner_has_adapters_in_its_tower_and_then_in_its_decoder(
    train: Train, data_dir: Path, masked: Path, tmp_path: Path
) -> None:
    out, both = tmp_path / "captions", tmp_path / "both"
    flags = ("--shards", data_dir, "--decoder.name", "tiny", "--decoder.max-tokens", 8, *LORA)
    assert train("caption", *SHORT, *flags, "--init.weights", masked, "--out", out) == 0
    names = stored(out, "model.")
    assert sum(".lora." in name for name in names) == 4 * 4 * 2
    assert all(name.startswith("decoder.") or ".lora." in name for name in names)
    assert train("eval", "caption", out) == 0
    whole = ("--shards", data_dir, "--init.weights", out, "--lora.towers", "video", "decoder", *LORA)
    assert train("caption", *SHORT, *whole, "--out", both) == 0
    assert stored(both, "model.") and all(".lora." in name for name in stored(both, "model."))
    before, after = weights(out), weights(both)
    assert before.keys() == after.keys() and not torch.equal(before[CROSS], after[CROSS])


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("dual-encoder", ("--freeze", "video", "text"), "--freeze video text leaves nothing to train"),
        ("mae", ("--freeze", "video", "decoder"), "--freeze video decoder leaves nothing to train"),
        ("caption", ("--freeze", "encoder", "decoder"), "--freeze encoder decoder leaves nothing to train"),
        ("dual-encoder", ("--freeze", "vision"), "--freeze is vision"),
        ("dual-encoder", ("--freeze", "blocks:all"), "--freeze is blocks:all"),
        ("dual-encoder", ("--freeze", "blocks:5"), "--freeze video.blocks:5, and the video tower has 4 blocks"),
        ("dual-encoder", ("--freeze", "text.blocks:3"), "--freeze text.blocks:3, and the text tower has 2 blocks"),
        ("classify", ("--freeze", "text"), "--freeze text: the model has no text tower of its own"),
        ("dual-encoder", ("--freeze", "text", "--text-tower", "frozen"), "the model has no text tower of its own"),
        ("dual-encoder", ("--freeze", "video", "--text-tower", "frozen"), "--freeze video leaves nothing to train"),
        ("dual-encoder", LORA, "--lora.rank is 2, and adapters are for pretrained weights"),
        ("dual-encoder", (*LORA, "--lora.towers", "decoder"), "--lora.towers decoder: the model has no decoder"),
        ("classify", (*LORA, "--lora.towers", "text"), "--lora.towers text: the model has no text tower"),
        (
            "dual-encoder",
            (*LORA, "--freeze", "text", "--lora.towers", "text"),
            "--lora.towers text adapts a tower that",
        ),
        ("classify", (*LORA, "--freeze", "video"), "--lora.rank is 2, and --freeze video leaves no tower to adapt"),
        ("dual-encoder", ("--lora.alpha", 4), "--lora.alpha is 4, which has no effect: --lora.rank is 0"),
        ("dual-encoder", ("--lora.rank", -1), "--lora.rank is -1"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    train: Train,
    data_dir: Path,
    source: Path,
    tmp_path: Path,
    command: str,
    flags: tuple[Any, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start = () if flags == LORA or command == "caption" else ("--init.weights", source)
    words = [*TINY, "--steps", 1, "--shards", data_dir, *start, *flags]
    if command == "mae":
        words = ["--model", "tiny", "--steps", 1, *flags]
    assert train(command, *words, "--out", tmp_path / "run") == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_decoder_without_pretrained_weights_gets_no_adapters(
    train: Train, data_dir: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--decoder.name", "tiny", "--decoder.max-tokens", 8, *LORA, "--lora.towers", "decoder")
    words = [*TINY, "--steps", 1, "--shards", data_dir, "--init.weights", source, *flags]
    assert train("caption", *words, "--out", tmp_path / "run") == 2
    assert "--lora.towers decoder adapts pretrained weights, and" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("part", ["video", "text"])
def test_a_frozen_tower_runs_once_for_each_clip_of_a_batch_in_parts(part: str) -> None:
    """In microbatches the trained tower runs twice; the gradients are those of the whole batch."""
    torch.manual_seed(0)
    model = DualEncoder(SIZES["tiny"], image_px=32, num_frames=2, attend=attend_with_sdpa).double()
    freeze(model, [frozen_part(part)])
    ids, video = torch.arange(4), torch.randn(4, 3, 2, 32, 32, dtype=torch.float64)
    tokens = torch.randint(1, 1000, (4, 6))
    tokens[:, -1] = 49407
    batch = Batch(input="pixels", video=video, tokens=tokens, clip_id=ids, caption_id=ids)
    objective = build_contrast(
        Loss(), inputs=lambda one: (one["video"], one["tokens"]), dataset=None, world=World()
    ).double()
    calls = {"video": 0, "text": 0}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            calls[name] += 1

        return hook

    for name in calls:
        model.get_submodule(name).register_forward_hook(count(name))
    found = []
    for microbatch in (None, 2):
        calls.update(video=0, text=0)
        model.zero_grad()
        objective.backward(model, batch, Step(number=1, microbatch=microbatch))
        found.append({name: one.grad for name, one in model.named_parameters()})
    assert calls == {"video": 4, "text": 4} | {part: 2}
    for name, gradient in found[0].items():
        assert (gradient is None) == name.startswith(f"{part}.")
        if gradient is not None:
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-12)
