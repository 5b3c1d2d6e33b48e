"""Parts that training drops at random: patches of clips, and blocks."""

import pytest
import torch

from clipmill.train.config.model import Towers
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.text import TextTower
from clipmill.train.models.transformer import (
    Block,
    Transformer,
    TransformerSize,
    blocks_of,
    draw_branch_scales,
    drop_path_of,
)
from clipmill.train.models.video_vit import VideoViT, choose_rows, draw_cubes
from tests.train.models.small_towers import clips, gradients, small_encoder


def tokens_that_reach_the_blocks(tower: VideoViT, video: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    handle = tower.ln_pre.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    tower(video)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("dropout, num_kept", [(0.5, 32), (0.9, 6), (0.99, 1)])
def test_the_class_token_stays_and_the_asked_share_of_cubes(dropout: float, num_kept: int) -> None:
    tower = small_encoder(Towers(patch_dropout=dropout, temporal="random")).video
    video = clips(3)
    all_BLD = tokens_that_reach_the_blocks(tower.eval(), video)
    kept_BLD = tokens_that_reach_the_blocks(tower.train(), video)
    assert (all_BLD.shape[1], kept_BLD.shape[1]) == (1 + 4 * 16, 1 + num_kept)
    torch.testing.assert_close(kept_BLD[:, 0], all_BLD[:, 0], atol=0, rtol=0)
    # Each kept token is a token of the clip at its own position, and no token occurs twice.
    distances = (kept_BLD[:, 1:, None] - all_BLD[:, None, 1:]).abs().amax(dim=3) < 1e-12
    assert (distances.sum(dim=2) == 1).all() and (distances.sum(dim=1) <= 1).all()


def test_each_clip_keeps_others_and_all_are_kept_equally_often() -> None:
    torch.manual_seed(0)
    kept = draw_cubes(4000, 10, dropout=0.7, device=torch.device("cpu"))
    assert kept.shape == (4000, 3)
    assert (kept.diff(dim=1) > 0).all()
    counts = torch.bincount(kept.flatten(), minlength=10)
    assert ((counts - 1200).abs() < 6 * (4000 * 0.3 * 0.7) ** 0.5).all()
    torch.testing.assert_close(choose_rows(torch.arange(8.0).view(2, 4, 1), torch.tensor([[0, 3], [1, 2]])).flatten(),
                               torch.tensor([0.0, 3.0, 5.0, 6.0]))  # fmt: skip


def test_torchs_generator_decides_what_is_left_out_and_evaluation_leaves_nothing() -> None:
    tower = small_encoder(Towers(patch_dropout=0.5, drop_path=0.5)).video
    video = clips(2)

    def run_seeded(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return tower(video)

    torch.testing.assert_close(run_seeded(1), run_seeded(1), atol=0, rtol=0)
    assert not torch.allclose(run_seeded(1), run_seeded(2))
    plain = small_encoder().video
    torch.testing.assert_close(tower.eval()(video), plain(video), atol=0, rtol=0)
    before = torch.get_rng_state()
    tower(video)
    assert torch.equal(before, torch.get_rng_state())


def test_dropping_nothing_changes_nothing() -> None:
    video = clips(2)
    plain, none = small_encoder().video, small_encoder(Towers(patch_dropout=0.0, drop_path=0.0)).video
    torch.testing.assert_close(plain.train()(video), none.train()(video), atol=0, rtol=0)


def test_paths_rise_to_the_last_block_or_stay() -> None:
    assert drop_path_of(0.3, depth=4, is_rising=True) == pytest.approx((0.0, 0.1, 0.2, 0.3))
    assert drop_path_of(0.3, depth=3, is_rising=False) == (0.3, 0.3, 0.3)
    assert drop_path_of(0.3, depth=1, is_rising=True) == (0.3,)
    for rule, expected in (("rising", (0.0, 0.2, 0.4)), ("constant", (0.4,) * 3)):
        encoder = small_encoder(Towers(drop_path=0.4, drop_path_rule=rule))  # type: ignore[arg-type]
        assert encoder.video.transformer.drop_path == pytest.approx(expected)
        assert isinstance(encoder.text, TextTower) and not any(encoder.text.transformer.drop_path)


def test_a_dropped_branch_leaves_its_item_as_it_was_and_the_others_weigh_more() -> None:
    torch.manual_seed(0)
    size = TransformerSize(width=32, depth=1, num_heads=4)
    block = blocks_of(small_encoder())[0]
    assert isinstance(block, Block)
    x = torch.randn(4, 5, 32, dtype=torch.float64)
    branches = torch.tensor([[0.0, 2.0, 0.0, 2.0], [0.0, 0.0, 2.0, 2.0]], dtype=torch.float64)[..., None, None]
    outputs = block(x, branches=branches)
    torch.testing.assert_close(outputs[0], x[0], atol=0, rtol=0)
    attended = x[1] + 2 * (block.attn(block.ln_1(x), causal=False, packing=None))[1]
    torch.testing.assert_close(outputs[1], attended, atol=1e-12, rtol=0)
    torch.testing.assert_close(outputs[2], x[2] + 2 * block.mlp(block.ln_2(x))[2], atol=1e-12, rtol=0)
    with pytest.raises(ValueError):
        Transformer(size, attend=attend_with_sdpa, drop_path=(0.1, 0.1)).double()(x)


def test_branches_are_kept_as_often_as_said_and_keep_the_mean() -> None:
    torch.manual_seed(0)
    branches = draw_branch_scales(torch.zeros(20_000, 1, 1), 0.25)
    assert branches.shape == (2, 20_000, 1, 1)
    assert branches.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    for branch in branches:
        assert branch.mean().item() == pytest.approx(1.0, abs=0.03)
    assert not torch.equal(branches[0], branches[1])


@pytest.mark.parametrize("probability", [0.05, 0.1, 0.3])
def test_branches_keep_the_mean_in_half_precision(probability: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 cannot represent 1 / 0.9: kept as often as in float32, a branch would be 0.16 % too small on average."""
    evenly = torch.arange(100_000) / 100_000
    monkeypatch.setattr(torch, "rand", lambda *shape, device: evenly[None, :, None, None])
    branches = draw_branch_scales(torch.zeros(100_000, 1, 1, dtype=torch.bfloat16), probability, count=1)
    assert branches.double().mean().item() == pytest.approx(1.0, abs=1e-4)


def test_cubes_that_are_left_out_get_no_gradient_of_their_places() -> None:
    tower = small_encoder(Towers(patch_dropout=0.9), num_frames=1).train().video
    gradient = gradients(tower, tower(clips(1, 1)).sum())["positional_embedding"]
    assert (gradient.abs().sum(dim=1) > 0).sum() == 1 + 1  # the class token and one of 16 cubes get gradients
