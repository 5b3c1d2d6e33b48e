"""The videomae tower and the masked autoencoder equal transformers' classes, in float64 with the same weights."""

import math
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from transformers import VideoMAEConfig, VideoMAEForPreTraining, VideoMAEForVideoClassification, VideoMAEModel

from clipmill.train.config.model import Towers
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.dual_encoder import SIZES, size_of
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.models.video_vit import VideoViTSize
from clipmill.train.models.videomae import MaskedAutoencoder, VideoMAEEncoder, decoder_size, predicted_cubes, sines
from clipmill.train.tasks.classify.task import VideoClassifier
from clipmill.train.tasks.mae.task import decoded_cubes, normalised_cubes, reconstruction_loss, tube_masks
from clipmill.train.weights.videomae import from_hf_videomae
from tests.train.models.small_towers import clips, spread_out

VIDEOMAE = Towers(kind="videomae")
SIZE = VideoViTSize(
    trunk=TransformerSize(width=32, depth=3, num_heads=4, norm_eps=1e-12, has_key_bias=False), patch_px=8, cube_frames=2
)
Module = TypeVar("Module", bound=torch.nn.Module)
IMAGENET_STD = (0.229, 0.224, 0.225)
assert_equal = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)


def autoencoder(towers: Towers = VIDEOMAE) -> MaskedAutoencoder:
    """Make an autoencoder for clips [B, 3, 4, 32, 32], with 2 time steps of 16 patches."""
    torch.manual_seed(0)
    model = MaskedAutoencoder(
        SIZE, decoder_depth=2, image_px=32, num_frames=4, attend=attend_with_sdpa, towers=towers
    ).double()
    spread_out(model)
    return model


def config(**changes: Any) -> VideoMAEConfig:
    """Return transformers' configuration for the same sizes."""
    values: dict[str, Any] = {
        **{"image_size": 32, "patch_size": 8, "num_frames": 4, "tubelet_size": 2, "norm_pix_loss": True},
        **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128},
        **{"decoder_hidden_size": 16, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2},
        **{"decoder_intermediate_size": 64, "use_mean_pooling": False, "attn_implementation": "eager"},
    }
    return VideoMAEConfig(**values | changes)


def masks(num_clips: int, *, ratio: float = 0.75) -> torch.Tensor:
    return tube_masks(torch.arange(num_clips), autoencoder().video.grid, ratio=ratio, seed=3)


def loss_of(
    model: MaskedAutoencoder, video: torch.Tensor, masked: torch.Tensor, decoded: torch.Tensor | None = None
) -> torch.Tensor:
    targets = normalised_cubes(video, predicted_cubes(masked, decoded), cube_frames=2, patch_px=8, std=IMAGENET_STD)
    return reconstruction_loss(model(video, masked, decoded), targets)


def copy_weights(theirs: torch.nn.Module, ours: Module) -> Module:
    """Return clipmill's module with the weights of transformers."""
    ours.double().load_state_dict(from_hf_videomae(theirs.state_dict()).tensors)
    return ours


def gradients_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_predictions_loss_and_all_gradients_are_those_of_transformers(ratio: float) -> None:
    theirs = VideoMAEForPreTraining(config()).double()
    spread_out(theirs)
    ours = copy_weights(theirs, autoencoder())
    video, masked = clips(3), masks(3, ratio=ratio)
    expected = theirs(video.transpose(1, 2), bool_masked_pos=masked)
    assert_equal(ours(video, masked), expected.logits)
    loss = loss_of(ours, video, masked)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-10, atol=0)
    loss.backward()
    expected.loss.backward()
    converted = from_hf_videomae(gradients_of(theirs)).tensors
    gradients = gradients_of(ours)
    assert gradients.keys() == converted.keys() == dict(ours.named_parameters()).keys()
    for name, gradient in gradients.items():
        assert_equal(gradient, converted[name])
        assert gradient.abs().max() > 1e-6, name


def test_without_a_mask_the_tower_is_transformers_model() -> None:
    theirs = VideoMAEModel(config()).double()
    spread_out(theirs)
    ours = torch.nn.Module()
    ours.video = VideoMAEEncoder(SIZE, image_px=32, num_frames=4, attend=attend_with_sdpa)
    copy_weights(theirs, ours)
    expected = theirs(clips(2).transpose(1, 2)).last_hidden_state
    assert_equal(ours.video(clips(2)), expected)
    assert_equal(ours.video.features(clips(2)), expected.mean(1))


def test_a_classifier_of_the_kind_is_transformers() -> None:
    theirs = VideoMAEForVideoClassification(config(use_mean_pooling=True, num_labels=5)).double().eval()
    spread_out(theirs)
    ours = VideoClassifier(
        SIZE, towers=VIDEOMAE, image_px=32, num_frames=4, num_classes=5, dropout=0.5, attend=attend_with_sdpa
    )
    assert ours.head.weight.std() < 1e-4 and not ours.head.bias.any()
    copy_weights(theirs, ours.eval())
    assert_equal(ours(clips(2)), theirs(clips(2).transpose(1, 2)).logits)


def test_the_visible_cubes_alone_reach_the_tower() -> None:
    model, masked = autoencoder(), masks(2)
    video = clips(2).requires_grad_()
    model(video, masked).sum().backward()
    assert video.grad is not None
    seen = video.grad.unflatten(2, (2, 2)).unflatten(4, (4, 8)).unflatten(6, (4, 8)).abs().amax((1, 3, 5, 7)) > 0
    assert torch.equal(seen.flatten(1), ~masked)


def test_what_is_not_decoded_changes_the_others_through_attention_alone() -> None:
    model, masked = autoencoder(), masks(2)
    grid = model.video.grid
    decoded = decoded_cubes(masked, torch.arange(2), grid, kind="random", ratio=0.5, seed=0)
    predicted = model(clips(2), masked, decoded)
    assert predicted.shape == (2, 12, 2 * 8 * 8 * 3) == (2, int((masked & decoded)[0].sum()), 384)
    assert torch.equal(predicted, model(clips(2), masked, decoded, num_masked=24, num_predicted=12))
    # Without blocks in the decoder, the values of a cube do not depend on which other cubes are decoded.
    model.decoder.transformer.resblocks = torch.nn.ModuleList()
    whole = model(clips(2), masked)
    places = torch.stack(
        [
            torch.searchsorted(*both)
            for both in zip(predicted_cubes(masked), predicted_cubes(masked, decoded), strict=True)
        ]
    )
    picked = whole.gather(1, places[..., None].expand(-1, -1, 384))
    assert_equal(model(clips(2), masked, decoded), picked)


def test_masks_of_different_counts_are_refused() -> None:
    masked = masks(2)
    masked[0, masked[0].nonzero()[0]] = False
    with pytest.raises(ValueError, match=r"different numbers of cubes: \[23, 24\]"):
        autoencoder()(clips(2), masked)


def test_blocks_computed_twice_give_the_same_gradients_with_blocks_skipped() -> None:
    def gradients(towers: Towers) -> dict[str, torch.Tensor]:
        model = autoencoder(towers).train()
        torch.manual_seed(5)
        loss_of(model, clips(3), masks(3)).backward()
        return gradients_of(model)

    plain = gradients(Towers(kind="videomae", drop_path=0.4))
    twice = gradients(Towers(kind="videomae", drop_path=0.4, activation_checkpointing=True))
    torch.testing.assert_close(twice, plain, rtol=0, atol=0)
    assert not torch.equal(gradients(VIDEOMAE)["decoder.mask_token"], plain["decoder.mask_token"])


def test_in_half_precision_blocks_pass_on_half_and_the_loss_is_float32() -> None:
    model, masked = autoencoder().float(), masks(2)
    seen = []
    model.decoder.transformer.resblocks[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        predicted = model(clips(2).float(), masked)
    targets = normalised_cubes(clips(2).float(), predicted_cubes(masked), cube_frames=2, patch_px=8, std=IMAGENET_STD)
    assert (seen, predicted.dtype) == ([torch.bfloat16], torch.bfloat16)
    loss = reconstruction_loss(predicted, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), loss_of(autoencoder(), clips(2), masked), rtol=0.05, atol=0)


def test_a_new_model_starts_with_uniform_weights_and_without_biases() -> None:
    model = MaskedAutoencoder(
        size_of("tiny", VIDEOMAE).video,
        decoder_depth=4,
        image_px=64,
        num_frames=8,
        attend=attend_with_sdpa,
        towers=VIDEOMAE,
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 2:
            most = (6 / sum(parameter.shape)) ** 0.5
            assert 0.98 * most < parameter.abs().max() <= most, name
            torch.testing.assert_close(parameter.std(), torch.tensor(most / 3**0.5), rtol=0.05, atol=0)
    assert 0.005 < model.decoder.mask_token.std() < 0.04


@pytest.mark.parametrize(
    "name, widths, heads",
    [
        ("tiny", (128, 64), (4, 2)),
        ("s16", (384, 192), (6, 3)),
        ("b16", (768, 384), (12, 6)),
        ("l16", (1024, 512), (16, 8)),
    ],
)
def test_decoders_are_half_as_wide_with_heads_of_the_same_width(
    name: str, widths: tuple[int, int], heads: tuple[int, int]
) -> None:
    encoder = SIZES[name].video.trunk
    decoder = decoder_size(encoder, depth=4)
    assert ((encoder.width, decoder.width), (encoder.num_heads, decoder.num_heads)) == (widths, heads)
    assert (decoder.depth, SIZES[name].video.patch_px) == (4, 16)


def test_places_are_told_by_sines_and_cosines() -> None:
    table = sines(1568, 768)
    assert (table.shape, table.dtype) == ((1568, 768), torch.float32)
    for place, column in [(0, 0), (0, 1), (1, 0), (1567, 5), (1567, 766), (901, 767)]:
        angle = place / 10_000 ** (2 * (column // 2) / 768)
        assert table[place, column].item() == pytest.approx(
            math.cos(angle) if column % 2 else math.sin(angle), abs=1e-7
        )
