"""TimeSformer compared with transformers' model with the same weights."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import TimesformerConfig, TimesformerModel

from clipmill.train.models.attention import Attend, attend_naively, attend_with_sdpa
from clipmill.train.models.timesformer import TimeSformer, interpolate_positions, interpolate_times
from clipmill.train.models.transformer import TransformerSize, checkpoint_blocks, compile_blocks
from clipmill.train.models.video_vit import VideoViTSize
from clipmill.train.weights.hf_caption import from_hf_caption
from tests.tiers import nightly_beyond
from tests.train.models.small_captioners import clips, for_them
from tests.train.models.small_towers import gradients, spread_out

FRAMES, PATCHES = 4, 16


@pytest.fixture(autouse=True)
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recompute values for the small clips of these tests, too."""
    monkeypatch.setattr("clipmill.train.models.timesformer.MIN_RECOMPUTED_VALUES", 0)


@pytest.fixture
def theirs() -> TimesformerModel:
    config = TimesformerConfig(
        image_size=32,
        patch_size=8,
        num_frames=FRAMES,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
    )
    torch.manual_seed(0)
    model = TimesformerModel(config).double().eval()
    spread_out(model)
    return model


def ours_with(
    tensors: dict[str, torch.Tensor], *, attend: Attend = attend_with_sdpa, image_px: int = 32
) -> TimeSformer:
    trunk = TransformerSize(width=32, depth=3, num_heads=4, norm_eps=1e-6)
    size = VideoViTSize(trunk=trunk, patch_px=8)
    ours = TimeSformer(size, image_px=image_px, num_frames=FRAMES, attend=attend).double().eval()
    ours.load_state_dict(tensors)
    return ours


def our_weights(theirs: TimesformerModel) -> dict[str, torch.Tensor]:
    converted = from_hf_caption(theirs.state_dict())
    assert not converted.unknown
    return {name.removeprefix("video."): tensor for name, tensor in converted.tensors.items()}


def in_their_order(tokens_BLD: torch.Tensor, *, patches: int = PATCHES) -> torch.Tensor:
    """Reorder tokens from frame by frame (clipmill) to patch by patch (transformers)."""
    by_frame = tokens_BLD[:, 1:].unflatten(1, (FRAMES, patches))
    return torch.cat([tokens_BLD[:, :1], by_frame.transpose(1, 2).flatten(1, 2)], dim=1)


@pytest.mark.parametrize("attend", [attend_with_sdpa, attend_naively])
def test_tokens_and_gradients_are_transformers(theirs: TimesformerModel, attend: Attend) -> None:
    ours = ours_with(our_weights(theirs), attend=attend).train()
    video = clips(2)
    expected, states = theirs(for_them(video)).last_hidden_state, in_their_order(ours(video))
    assert expected.std() > 0.5
    torch.testing.assert_close(states, expected, atol=1e-11, rtol=0)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    their_gradients = from_hf_caption(gradients(theirs, (expected * weights).sum())).tensors
    our_gradients = gradients(ours, (states * weights).sum())
    assert len(our_gradients) == len(their_gradients)
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[f"video.{name}"], atol=1e-9, rtol=1e-9, msg=name)


def test_pictures_of_another_size_are_transformers_with_the_nearest_places(theirs: TimesformerModel) -> None:
    weights = our_weights(theirs)
    weights["positional_embedding"] = interpolate_positions(weights["positional_embedding"], 36)
    video = clips(2, image_px=48)
    states = in_their_order(ours_with(weights, image_px=48)(video), patches=36)
    torch.testing.assert_close(states, theirs(for_them(video)).last_hidden_state, atol=1e-11, rtol=0)


def test_other_numbers_of_frames_have_the_nearest_times_as_transformers(theirs: TimesformerModel) -> None:
    for num_frames in (3, 8):
        embeddings = theirs.embeddings
        # The frames are zeros, so only the positions remain.
        video = torch.zeros(1, num_frames, 3, 32, 32, dtype=torch.float64)
        embedded = embeddings(video)[0, 1:].unflatten(0, (PATCHES, num_frames))
        bias = embeddings.patch_embeddings.projection.bias
        assert bias is not None
        without_times = embeddings.position_embeddings[0, 1:] + bias
        expected = without_times[:, None] + interpolate_times(embeddings.time_embeddings[0], num_frames)
        torch.testing.assert_close(embedded, expected, atol=1e-12, rtol=0)


def test_places_of_no_square_are_refused() -> None:
    with pytest.raises(ValueError, match="square"):
        interpolate_positions(torch.zeros(17, 4), 12)


def test_less_is_kept_for_the_backward_pass_than_of_all_that_is_computed(theirs: TimesformerModel) -> None:
    ours, video = ours_with(our_weights(theirs)).train(), clips(2)
    kept, theirs_kept = kept_values(ours, video), kept_values(theirs.train(), for_them(video))
    assert kept < 0.7 * theirs_kept


def kept_values(model: torch.nn.Module, video: torch.Tensor) -> int:
    """Return the number of values that a forward pass stores for the backward pass, without parameters."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outcome = model(video)
    assert outcome is not None
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) // 8


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "checkpointed": checkpoint_blocks,
    "compiled": lambda model: compile_blocks(model, backend="eager", fullgraph=True),
}


@pytest.mark.parametrize("name", nightly_beyond(["checkpointed"], CHANGES))
def test_checkpointed_and_compiled_blocks_give_the_same_gradients(name: str, theirs: TimesformerModel) -> None:
    weights, video = our_weights(theirs), clips(2)
    plain, changed = ours_with(weights).train(), ours_with(weights).train()
    CHANGES[name](changed)
    expected = gradients(plain, plain(video).square().sum())
    for parameter, gradient in gradients(changed, changed(video).square().sum()).items():
        torch.testing.assert_close(gradient, expected[parameter], atol=1e-9, rtol=1e-9, msg=parameter)


def test_a_dropped_part_leaves_its_clip_as_it_was(theirs: TimesformerModel) -> None:
    block = ours_with(our_weights(theirs)).transformer.resblocks[0]
    x = torch.randn(2, 1 + FRAMES * PATCHES, 32, dtype=torch.float64)
    none = torch.zeros(3, 2, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(block(x, branches=none), x, atol=0, rtol=0)
    kept = none.clone()
    kept[:, 1] = 1
    outputs = block(x, branches=kept)
    torch.testing.assert_close(outputs[0], x[0], atol=0, rtol=0)
    torch.testing.assert_close(outputs[1], block(x)[1], atol=1e-12, rtol=0)


def test_a_new_block_ignores_time() -> None:
    torch.manual_seed(0)
    size = VideoViTSize(trunk=TransformerSize(width=32, depth=2, num_heads=4), patch_px=8)
    tower = TimeSformer(size, image_px=32, num_frames=FRAMES, attend=attend_with_sdpa).double()
    video = clips(1)
    forwards, backwards = tower(video), tower(video.flip(2))
    torch.testing.assert_close(forwards[:, 0], backwards[:, 0], atol=1e-12, rtol=0)
