"""The captioner compared with transformers' VisionEncoderDecoderModel, as one model and in parts."""

from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import VisionEncoderDecoderModel

from clipmill.train.models.attention import attend_naively, attend_with_sdpa
from clipmill.train.models.captioner import GPT2_SIZES, Captioner, Gpt2, Gpt2Size
from clipmill.train.models.transformer import TransformerSize, blocks_of, checkpoint_blocks
from clipmill.train.models.video_vit import VideoViT, VideoViTSize
from clipmill.train.models.videomae import VideoMAEEncoder
from clipmill.train.tasks.caption.export import save_hf
from clipmill.train.tasks.caption.stages import (
    TIED,
    CaptionerPart,
    Layer,
    all_layers,
    layers_for,
    owners_of,
    parameters_by_layer,
)
from clipmill.train.tasks.caption.task import shift_targets, summed_loss
from clipmill.train.weights.hf_caption import from_hf_caption
from tests.train.models.small_captioners import (
    END,
    PAD,
    captioner_in,
    clips,
    for_them,
    ours_with_weights_of,
    targets,
    their_captioner,
)
from tests.train.models.small_towers import gradients, spread_out

LENGTHS = (5, 1, 9)


def loss_of(logits: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
    return summed_loss(logits, targets_BL) / (targets_BL >= 0).sum()


@pytest.mark.parametrize(("video_width", "text_width"), [(32, 24), (24, 24)])
def test_logits_loss_and_gradients_are_transformers(tmp_path: Path, video_width: int, text_width: int) -> None:
    theirs = their_captioner(video_width=video_width, text_width=text_width)
    ours = ours_with_weights_of(theirs, tmp_path)
    assert (ours.projection is None) == (video_width == text_width)
    video, target_ids = clips(len(LENGTHS)), targets(*LENGTHS)
    expected = theirs(pixel_values=for_them(video), labels=target_ids)
    logits = ours(video, shift_targets(target_ids, end_id=END))
    is_said = target_ids >= 0
    assert expected.logits.std() > 0.1
    # transformers pads with a different token, whose logits are not compared.
    torch.testing.assert_close(logits[is_said], expected.logits[is_said], atol=1e-11, rtol=0)
    loss = loss_of(logits, target_ids)
    torch.testing.assert_close(loss, expected.loss, atol=1e-12, rtol=0)
    their_gradients = from_hf_caption(gradients(theirs, expected.loss)).tensors
    our_gradients = gradients(ours, loss)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name], atol=1e-11, rtol=1e-8, msg=name)


def test_what_follows_an_end_does_not_matter(tmp_path: Path) -> None:
    ours, video, target_ids = ours_with_weights_of(their_captioner(), tmp_path), clips(3), targets(*LENGTHS)
    tokens = shift_targets(target_ids, end_id=END)
    filled_otherwise = torch.where(target_ids < 0, PAD, tokens)
    losses = [loss_of(ours(video, token_ids), target_ids) for token_ids in (tokens, filled_otherwise)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-13, rtol=0)


def test_several_captions_of_a_video_are_as_many_videos_with_one(tmp_path: Path) -> None:
    ours, video = ours_with_weights_of(their_captioner(), tmp_path, attend=attend_naively), clips(2)
    target_ids = targets(4, 2, 6, 3, 1, 5).view(2, 3, 7)
    together = ours(video, shift_targets(target_ids, end_id=END))
    apart = ours(video.repeat_interleave(3, 0), shift_targets(target_ids, end_id=END).flatten(0, 1))
    torch.testing.assert_close(together, apart, atol=1e-12, rtol=0)
    losses = [loss_of(logits, target_ids) for logits in (together, apart)]
    for name, gradient in gradients(ours, losses[0]).items():
        torch.testing.assert_close(gradient, gradients(ours, losses[1])[name], atol=1e-11, rtol=1e-8, msg=name)
        break


def test_decoders_have_every_parameter_of_transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        size = GPT2_SIZES[name]
        config = GPT2Config(
            n_embd=size.trunk.width, n_layer=size.trunk.depth, n_head=size.trunk.num_heads, add_cross_attention=True
        )
        with torch.device("meta"):
            theirs = from_hf_caption(GPT2LMHeadModel(config).state_dict())
            ours = Gpt2(size, attend=attend_with_sdpa)
        assert not theirs.unknown
        assert {f"decoder.{key}": value.shape for key, value in ours.state_dict().items()} == {
            key: value.shape for key, value in theirs.tensors.items()
        }


@pytest.mark.parametrize("tower", ["timesformer", "clip", "videomae"])
def test_parts_of_a_captioner_do_what_the_whole_does(tmp_path: Path, tower: str) -> None:
    whole = captioner_with(tower, tmp_path)
    video, target_ids = clips(3), targets(*LENGTHS)
    tokens = shift_targets(target_ids, end_id=END)
    expected = gradients(whole, loss_of(whole(video, tokens), target_ids))
    num_stages = len(all_layers(whole))
    for cuts in ((5,), (1, 6, 8), tuple(range(1, num_stages))):
        borders = (0, *cuts, num_stages)
        parts = [CaptionerPart(deepcopy(whole), start=start, end=end) for start, end in pairwise(borders)]
        carried: tuple[torch.Tensor, ...] = (video,)
        for part in parts:
            outcome = part(*carried, tokens=tokens)
            carried = outcome if isinstance(outcome, tuple) else (outcome,)
        loss_of(carried[0], target_ids).backward()
        losses: dict[str, torch.Tensor] = {}
        for part in parts:
            for name, parameter in part.named_parameters():
                assert parameter.grad is not None, name
                # Each end of the tied embedding has a part of its gradient.
                assert name not in losses or name == TIED
                losses[name] = losses[name] + parameter.grad if name in losses else parameter.grad
        assert losses.keys() == expected.keys()
        for name, gradient in losses.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-12, rtol=1e-9, msg=name)


def captioner_with(tower: str, tmp_path: Path) -> Captioner:
    if tower == "timesformer":
        return ours_with_weights_of(their_captioner(), tmp_path)
    torch.manual_seed(0)
    trunk = TransformerSize(width=32, depth=3, num_heads=4, has_key_bias=tower == "clip")
    size = VideoViTSize(trunk=trunk, patch_px=8, cube_frames=1 if tower == "clip" else 2)
    video: nn.Module
    if tower == "clip":
        video = VideoViT(size, image_px=32, num_frames=4, embedding_width=None, attend=attend_with_sdpa)
    else:
        video = VideoMAEEncoder(size, image_px=32, num_frames=4, attend=attend_with_sdpa)
    text = Gpt2Size(trunk=TransformerSize(width=24, depth=3, num_heads=4), vocabulary_size=END + 1, context_length=40)
    captioner = Captioner(video, Gpt2(text, attend=attend_with_sdpa)).double()
    spread_out(captioner)
    return captioner


def test_a_tower_hands_out_the_tokens_whose_first_is_its_class(tmp_path: Path) -> None:
    tower = captioner_with("clip", tmp_path).video
    assert isinstance(tower, VideoViT)
    video = clips(2)
    tokens = tower.finish(tower.transformer(tower.embed(video)))
    torch.testing.assert_close(tokens[:, 0], tower.features(video), atol=1e-13, rtol=0)
    assert tokens.shape == (2, 1 + 4 * 16, 32)


def test_every_parameter_has_its_stage_and_counts_there(tmp_path: Path) -> None:
    whole = captioner_with("timesformer", tmp_path)
    stages = all_layers(whole)
    assert stages == layers_for(video_depth=3, text_depth=3)
    assert [stage.kind for stage in stages] == [
        "video_embedding",
        *["video_block"] * 3,
        "video_norm",
        "token_embedding",
        *["text_block"] * 3,
        "head",
    ]
    for name, _ in whole.named_parameters():
        assert set(owners_of(name)) <= set(stages)
    assert owners_of(TIED) == (Layer("token_embedding"), Layer("head"))
    numbers = dict(zip(stages, parameters_by_layer(whole), strict=True))
    tied = whole.decoder.token_embedding.weight.numel()
    assert numbers[Layer("head")] == tied + 2 * 24
    assert sum(numbers.values()) == tied + sum(parameter.numel() for parameter in whole.parameters())
    with pytest.raises(ValueError, match="no layer"):
        owners_of("decoder.else")


def test_parts_are_made_without_memory_for_the_rest() -> None:
    trunk = TransformerSize(width=32, depth=2, num_heads=4)
    with torch.device("meta"):
        tower = VideoViT(
            VideoViTSize(trunk=trunk, patch_px=8),
            image_px=32,
            num_frames=4,
            embedding_width=None,
            attend=attend_naively,
        )
        captioner = Captioner(tower, Gpt2(Gpt2Size(trunk=trunk, vocabulary_size=50), attend=attend_naively))
    names = [name for name, _ in captioner.named_parameters()]
    part = CaptionerPart(captioner, start=6, end=8).to_empty(device="cpu")
    assert [name for name, _ in part.named_parameters()] == [
        name for name in names if set(owners_of(name)) & {Layer("text_block", 1), Layer("head")}
    ]
    assert len(blocks_of(part)) == 1
    with pytest.raises(ValueError, match="layers"):
        CaptionerPart(captioner, start=3, end=3)


def test_checkpointed_blocks_give_the_same_gradients(tmp_path: Path) -> None:
    whole, video, target_ids = captioner_with("timesformer", tmp_path), clips(3), targets(*LENGTHS)
    tokens = shift_targets(target_ids, end_id=END)
    expected = gradients(whole, loss_of(whole(video, tokens), target_ids))
    checkpoint_blocks(whole)
    for name, gradient in gradients(whole, loss_of(whole(video, tokens), target_ids)).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-12, rtol=1e-9, msg=name)


def test_dropout_is_for_training_alone() -> None:
    torch.manual_seed(0)
    size = Gpt2Size(trunk=TransformerSize(width=24, depth=2, num_heads=4), vocabulary_size=50)
    decoder = Gpt2(size, attend=attend_with_sdpa, dropout=0.5)
    tokens, video = torch.arange(6).view(2, 3), torch.randn(2, 5, 24)
    first, second = decoder(tokens, video), decoder(tokens, video)
    assert not torch.equal(first, second)
    decoder.eval()
    torch.testing.assert_close(decoder(tokens, video), decoder(tokens, video), atol=0, rtol=0)


def test_texts_beyond_the_context_are_refused() -> None:
    size = Gpt2Size(trunk=TransformerSize(width=24, depth=1, num_heads=4), vocabulary_size=50, context_length=4)
    decoder = Gpt2(size, attend=attend_with_sdpa)
    with pytest.raises(ValueError, match="5 tokens"):
        decoder(torch.zeros(1, 5, dtype=torch.int64), torch.randn(1, 2, 24))


def test_transformers_reads_what_we_write(tmp_path: Path) -> None:
    ours = ours_with_weights_of(their_captioner(), tmp_path / "theirs")
    save_hf(ours, tmp_path / "ours", end_id=END, pad_id=PAD)
    loaded: Any = VisionEncoderDecoderModel.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=torch.float64
    )
    again, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    video, target_ids = clips(3), targets(*LENGTHS)
    expected = again.eval()(pixel_values=for_them(video), labels=target_ids)
    torch.testing.assert_close(
        loss_of(ours(video, shift_targets(target_ids, end_id=END)), target_ids), expected.loss, atol=1e-12, rtol=0
    )
    again.save_pretrained(tmp_path / "again")
    back = captioner_in(tmp_path / "again")
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(back.double().state_dict()[name], tensor, atol=0, rtol=0, msg=name)
