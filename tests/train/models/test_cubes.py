"""Cubes of one or more frames, and their temporal embeddings."""

import pytest
import torch
from torch import nn

from clipmill.train.config.model import Towers
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.video_vit import CubeEmbedding, VideoViT, inflate_cubes, resample_temporal
from tests.train.models.small_towers import clips, small_encoder, small_size


@pytest.mark.parametrize("cube_frames", [1, 2, 4])
def test_cubes_are_embedded_as_by_a_convolution(cube_frames: int) -> None:
    torch.manual_seed(0)
    embedding = CubeEmbedding(small_size(Towers(tubelet=cube_frames)).video).double()
    kernel = (cube_frames, 8, 8)
    convolution = nn.Conv3d(3, 32, kernel_size=kernel, stride=kernel, bias=False).double()
    weight = convolution.weight if cube_frames > 1 else convolution.weight[:, :, 0]
    embedding.load_state_dict({"weight": weight})
    video = clips(2, 8)
    expected_BSPD = convolution(video).flatten(3).permute(0, 2, 3, 1)
    assert expected_BSPD.shape == (2, 8 // cube_frames, 16, 32)
    torch.testing.assert_close(embedding(embedding.cut(video)), expected_BSPD, atol=1e-12, rtol=0)


def test_the_weights_begin_as_a_convolutions_do() -> None:
    torch.manual_seed(0)
    weight = CubeEmbedding(small_size(Towers(tubelet=2)).video).weight
    theirs = nn.Conv3d(3, 32, kernel_size=(2, 8, 8), bias=False).weight
    assert weight.shape == theirs.shape
    assert weight.std().item() == pytest.approx(theirs.std().item(), rel=0.05)
    assert weight.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=0.05)


def test_inflated_weights_give_on_equal_frames_what_one_frame_gave() -> None:
    torch.manual_seed(0)
    embedding = CubeEmbedding(small_size().video).double()
    three = CubeEmbedding(small_size(Towers(tubelet=3)).video).double()
    three.load_state_dict({"weight": inflate_cubes(embedding.weight.detach(), 3)})
    frame = clips(2, 1)
    still = frame.expand(-1, -1, 3, -1, -1)
    torch.testing.assert_close(three(three.cut(still)), embedding(embedding.cut(frame)), atol=1e-12, rtol=0)
    assert inflate_cubes(embedding.weight, 1) is embedding.weight


@pytest.mark.parametrize("tubelet", [1, 2])
def test_the_order_of_cubes_matters_through_the_temporal_embedding_alone(tubelet: int) -> None:
    video = clips(2)
    backwards = video.unflatten(2, (-1, tubelet)).flip(2).flatten(2, 3)
    blind = small_encoder(Towers(tubelet=tubelet)).video
    assert not blind.temporal_embedding.any()
    torch.testing.assert_close(blind(video), blind(backwards), atol=1e-12, rtol=0)
    seeing = small_encoder(Towers(tubelet=tubelet, temporal="random")).video
    assert seeing.temporal_embedding.shape == (4 // tubelet, 32)
    assert not torch.allclose(seeing(video), seeing(backwards), atol=1e-3)


def test_the_order_within_a_cube_matters_by_itself() -> None:
    video = clips(2)
    tower = small_encoder(Towers(tubelet=2)).video
    swapped = video.unflatten(2, (-1, 2)).flip(3).flatten(2, 3)
    assert not torch.allclose(tower(video), tower(swapped), atol=1e-3)


def test_a_temporal_embedding_begins_as_settings_say() -> None:
    towers = {"zero": Towers(), "random": Towers(temporal="random")}
    for name, std in (("zero", 0.0), ("random", 32**-0.5)):
        torch.manual_seed(0)
        size = small_size(towers[name]).video
        tower = VideoViT(
            size, image_px=32, num_frames=64, embedding_width=24, attend=attend_with_sdpa, temporal_std=std
        )
        assert tower.temporal_embedding.std().item() == pytest.approx(std, rel=0.1)


def test_a_temporal_embedding_for_more_frames_is_linear_between_the_centres_of_the_old() -> None:
    old = torch.tensor([[0.0, 8.0], [4.0, 0.0], [8.0, 8.0], [12.0, 0.0]])
    new = resample_temporal(old, 16)
    # The center of part i of 16 is at (i + 1/2) / 4 - 1/2, in units of the old parts.
    centres = ((torch.arange(16) + 0.5) / 4 - 0.5).clamp(0, 3)
    torch.testing.assert_close(new[:, 0], 4 * centres)
    between = centres.frac()
    left, right = old[centres.long(), 1], old[centres.long().add(1).clamp(max=3), 1]
    torch.testing.assert_close(new[:, 1], left + (right - left) * between)
    assert resample_temporal(old, 4) is old
    torch.testing.assert_close(resample_temporal(torch.ones(4, 2), 7), torch.ones(7, 2))


def test_what_cannot_be_cut_is_refused() -> None:
    for image_px, num_frames in ((30, 4), (32, 3)):
        with pytest.raises(ValueError, match="cannot be cut"):
            VideoViT(
                small_size(Towers(tubelet=2)).video,
                image_px=image_px,
                num_frames=num_frames,
                embedding_width=24,
                attend=attend_with_sdpa,
            )
