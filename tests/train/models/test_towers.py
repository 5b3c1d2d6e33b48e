"""The towers against open_clip's, with the same weights."""

import pytest
import torch
from open_clip.transformer import TextTransformer, VisionTransformer

from train.models.attention import attend_with_sdpa
from train.models.dual_encoder import SIZES, DualEncoder
from train.models.text import TextTower, TextTowerSize, load_tokenizer
from train.models.transformer import TransformerSize
from train.models.video_vit import VideoViT, VideoViTSize

TRUNK = TransformerSize(width=32, depth=3, num_heads=4)


@pytest.fixture
def video_tower() -> VideoViT:
    torch.manual_seed(0)
    size = VideoViTSize(trunk=TRUNK, patch_px=8)
    return VideoViT(size, image_px=32, num_frames=1, embedding_width=24, attend=attend_with_sdpa).double()


@pytest.fixture
def text_tower() -> TextTower:
    torch.manual_seed(0)
    size = TextTowerSize(trunk=TRUNK, vocabulary_size=100, context_length=12)
    return TextTower(size, embedding_width=24, attend=attend_with_sdpa).double()


def test_one_frame_without_temporal_embedding_is_the_image_tower(video_tower: VideoViT) -> None:
    theirs = VisionTransformer(
        image_size=32, patch_size=8, width=32, layers=3, heads=4, mlp_ratio=4.0, output_dim=24
    ).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    outcome = video_tower.load_state_dict(theirs.state_dict(), strict=False)
    assert (outcome.missing_keys, outcome.unexpected_keys) == (["temporal_embedding"], [])
    torch.nn.init.zeros_(video_tower.temporal_embedding)
    images = torch.randn(5, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(video_tower(images[:, :, None]), theirs(images), atol=1e-10, rtol=0)


def test_the_order_of_frames_matters_through_the_temporal_embedding_alone() -> None:
    torch.manual_seed(0)
    size = VideoViTSize(trunk=TRUNK, patch_px=8)
    tower = VideoViT(
        size, image_px=32, num_frames=4, embedding_width=24, attend=attend_with_sdpa, temporal_std=0.2
    ).double()
    clips = torch.randn(2, 3, 4, 32, 32, dtype=torch.float64)
    assert not torch.allclose(tower(clips), tower(clips.flip(2)))
    torch.nn.init.zeros_(tower.temporal_embedding)
    torch.testing.assert_close(tower(clips), tower(clips.flip(2)), atol=1e-10, rtol=0)


def test_the_text_tower_is_open_clips(text_tower: TextTower) -> None:
    theirs = TextTransformer(context_length=12, vocab_size=100, width=32, heads=4, layers=3, output_dim=24).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    text_tower.load_state_dict(theirs.state_dict())
    tokens = torch.zeros(3, 12, dtype=torch.int64)
    for row, length in enumerate([2, 5, 12]):
        tokens[row, :length] = torch.randint(1, 99, (length,))
        tokens[row, length - 1] = 99
    torch.testing.assert_close(text_tower(tokens), theirs(tokens), atol=1e-10, rtol=0)


def test_what_follows_the_end_of_a_text_does_not_matter(text_tower: TextTower) -> None:
    tokens = torch.tensor([[1, 5, 99, 0, 0, 0], [1, 6, 7, 8, 99, 0]])
    noisy = torch.tensor([[1, 5, 99, 7, 3, 99], [1, 6, 7, 8, 99, 4]])
    torch.testing.assert_close(text_tower(tokens), text_tower(noisy), atol=1e-12, rtol=0)
    alone = torch.cat([text_tower(row[None]) for row in tokens])
    torch.testing.assert_close(text_tower(tokens), alone, atol=1e-12, rtol=0)


def test_the_b16_size_is_clips() -> None:
    with torch.device("meta"):
        model = DualEncoder(SIZES["b16"], image_px=224, num_frames=4, attend=attend_with_sdpa)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == 149_620_736 + model.video.temporal_embedding.numel()


def test_embeddings_have_unit_length() -> None:
    torch.manual_seed(0)
    model = DualEncoder(SIZES["tiny"], image_px=32, num_frames=2, attend=attend_with_sdpa)
    video, text = model(torch.randn(3, 3, 2, 32, 32), torch.tensor([[1, 5, 49407]] * 3))
    torch.testing.assert_close(video.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(text.norm(dim=1), torch.ones(3))


def test_the_tokenizer_wraps_pads_and_cuts() -> None:
    tokenize = load_tokenizer()
    ids = tokenize("A red circle moves left")
    assert ids.dtype == "int64" and ids.shape == (77,)
    assert ids[0] == 49406 and ids[6] == 49407 and not ids[7:].any()
    assert (ids == tokenize("  a RED circle moves   left")).all()
    long = tokenize("word " * 200)
    assert long[76] == 49407 and (long != 0).all()
