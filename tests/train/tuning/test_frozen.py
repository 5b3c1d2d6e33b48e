"""Frozen parts: which tensors do not change, their cost, and the tasks that support them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.train.config.model import frozen_part
from clipmill.train.data.batch import Batch
from clipmill.train.distributed.world import Step, World
from clipmill.train.losses.contrastive import build_contrast
from clipmill.train.losses.settings import Loss
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.dual_encoder import SIZES, DualEncoder
from clipmill.train.optim.parameters import freeze
from clipmill.train.run.folder import RunFolder
from tests.tiers import nightly_beyond
from tests.train.classify.moving import write_moving
from tests.train.running import train
from tests.train.tuning.runs import LORA, SHORT, SMALL, TINY, stored_names, weights

STEM = {f"video.{name}" for name in ("class_embedding", "positional_embedding", "temporal_embedding", "conv1.weight")}
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


@pytest.mark.parametrize("case", nightly_beyond(["text", "blocks"], FROZEN))
def test_frozen_parts_stay_as_they_are_to_the_bit(
    data_dir: Path, source: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    flags = [*SMALL, "--shards", data_dir, "--init.weights", source, *FROZEN[case]]
    assert train("dual-encoder", *flags, "--out", out) == 0
    before, after = weights(source), weights(out)
    assert before.keys() == after.keys()
    frozen = {name for name in after if is_frozen(name, case)}
    assert {name for name in after if torch.equal(before[name], after[name])} == frozen
    total, num_frozen = (sum(after[name].numel() for name in names) for names in (after, frozen))
    message = f"{total:,}, {num_frozen:,} of them frozen ({'; '.join(FROZEN[case][1 : 3 if case == 'blocks' else 2])})"
    printed = capsys.readouterr().out
    assert "freezes random weights" not in printed
    assert f"parameters: {message}\n" in printed and RunFolder(out).read_facts()["parameters"] == message
    # For a frozen tensor, a checkpoint stores only the tensor itself.
    assert stored_names(out, "model.") == after.keys()
    assert stored_names(out, "ema.") == after.keys() - frozen
    assert {name.rpartition(".")[0] for name in stored_names(out, "optimizer.model.")} == after.keys() - frozen


def test_the_first_blocks_are_run_without_a_graph(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts before the last block of either tower need neither stored activations nor a backward pass."""
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
        flags = [*TINY, "--towers.depth", 4, "--lr", "1e-3", "--steps", 1]
        flags += ["--shards", data_dir, "--out", tmp_path / "run"]
        assert train("dual-encoder", *flags, "--freeze", "blocks:3", "text.blocks:1") == 0
    message = "--freeze blocks:3 text.blocks:1 freezes random weights, because --init.weights is not set\n"
    assert message in capsys.readouterr().out
    grown = {name for name, has_graph in seen.items() if has_graph}
    assert len(seen) == 7 and grown == {"video.transformer.resblocks.3", "text.transformer.resblocks.1"}


@pytest.mark.parametrize("part", ["video", "text"])
def test_a_frozen_tower_runs_once_for_each_clip_of_a_batch_in_parts(part: str) -> None:
    """In microbatches, the trained tower runs twice, and the gradients are those of the complete batch."""
    torch.manual_seed(0)
    model = DualEncoder(SIZES["tiny"], image_px=32, num_frames=2, attend=attend_with_sdpa).double()
    freeze(model, [frozen_part(part)])
    ids, video = torch.arange(4), torch.randn(4, 3, 2, 32, 32, dtype=torch.float64)
    tokens = torch.randint(1, 1000, (4, 6))
    tokens[:, -1] = 49407
    batch = Batch(input="pixels", video=video, tokens=tokens, clip_id=ids, caption_id=ids)
    objective = build_contrast(
        Loss(), inputs=lambda batch: (batch["video"], batch["tokens"]), dataset=None, world=World()
    ).double()
    calls = {"video": 0, "text": 0}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            calls[name] += 1

        return hook

    for name in calls:
        model.get_submodule(name).register_forward_hook(count(name))
    gradients = []
    for microbatch in (None, 2):
        calls.update(video=0, text=0)
        model.zero_grad()
        objective.backward(model, batch, Step(number=1, microbatch=microbatch))
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert calls == {"video": 4, "text": 4} | {part: 2}
    for name, gradient in gradients[0].items():
        assert (gradient is None) == name.startswith(f"{part}.")
        if gradient is not None:
            torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (("--freeze", "video"), ""),
        ((*LORA, "--dropout", 0.1), r"video\..*(in_proj_weight|out_proj\.weight|c_fc\.weight|c_proj\.weight)"),
    ],
)
def test_a_classifier_trains_its_head_and_what_is_not_frozen(
    masked_run: Path, tmp_path: Path, flags: tuple[Any, ...], changed: str
) -> None:
    moving, out = tmp_path / "moving", tmp_path / "run"
    write_moving(moving, num_videos=4)
    assert train("classify", *SHORT, "--shards", moving, "--init.weights", masked_run, *flags, "--out", out) == 0
    before, after = weights(masked_run), weights(out)
    assert {"head.weight", "fc_norm.weight"} <= after.keys() - before.keys()
    shared = before.keys() & after.keys()
    assert {name for name in shared if not torch.equal(before[name], after[name])} == {
        name for name in shared if re.fullmatch(changed, name)
    }
    if flags[:2] == LORA[:2]:
        # A file in VideoMAE's format contains the merged encoder.
        assert train("export", out, "--format", "videomae", "--out", tmp_path / "exported") == 0
        file = torch.load(tmp_path / "exported" / "checkpoint.pth", weights_only=True)["model"]
        assert torch.equal(file["blocks.0.mlp.fc1.weight"], after["video.transformer.resblocks.0.mlp.c_fc.weight"])
