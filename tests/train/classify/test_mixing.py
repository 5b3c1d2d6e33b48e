import numpy as np
import pytest
import torch

from clipmill.train.tasks.classify.task import (
    NO_MIX,
    Mix,
    cut_around,
    draw_mix,
    mix_clips,
    mixed_targets,
    soft_cross_entropy,
)

SIZE = 8


def clips() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal((4, 3, 2, SIZE, SIZE)))


def test_mixup_blends_each_clip_and_its_target_with_those_opposite() -> None:
    video, labels, mix = clips(), torch.tensor([0, 2, 2, 1]), Mix(0.3)
    mixed = mix_clips(video, video.flip(0), mix)
    targets = mixed_targets(labels, num_classes=5, smoothing=0.1, mix=mix)
    for row in range(4):
        torch.testing.assert_close(mixed[row], 0.3 * video[row] + 0.7 * video[3 - row])
        expected = np.full(5, 0.1 / 5)
        expected[labels[row]] += 0.3 * 0.9
        expected[labels[3 - row]] += 0.7 * 0.9
        assert np.allclose(targets[row], expected) and np.isclose(targets[row].sum(), 1)


def test_cutmix_takes_one_rectangle_of_all_frames_and_as_much_of_the_target() -> None:
    video, labels = clips(), torch.tensor([0, 1, 2, 3])
    mix = cut_around(6, 3, weight=0.75, size_px=SIZE)  # a square of 4 that the lower edge cuts off
    assert mix == Mix(1 - 4 * 4 / 64, (4, 8, 1, 5))
    mixed = mix_clips(video, video.flip(0), mix)
    targets = mixed_targets(labels, num_classes=4, smoothing=0.0, mix=mix)
    for row in range(4):
        for y in range(SIZE):
            for x in range(SIZE):
                source = video[3 - row] if 4 <= y < 8 and 1 <= x < 5 else video[row]
                assert (mixed[row, :, :, y, x] == source[:, :, y, x]).all()
        assert targets[row].tolist() == [
            0.75 if label == row else 0.25 if label == 3 - row else 0 for label in range(4)
        ]
    assert cut_around(0, 0, weight=1.0, size_px=SIZE) == Mix(1.0, (0, 0, 0, 0))
    edge = cut_around(7, 0, weight=0.0, size_px=SIZE)
    assert edge.box == (3, 8, 0, 4) and edge.weight == 1 - 20 / 64


def test_without_either_nothing_is_mixed_and_nothing_is_drawn() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert draw_mix(mixup=0.0, cutmix=0.0, size_px=SIZE) == NO_MIX
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_drawn_is_seeded_and_has_the_beta_distributions_moments() -> None:
    def draw_mixes(seed: int, count: int = 1, **alphas: float) -> list[Mix]:
        torch.manual_seed(seed)
        return [draw_mix(size_px=224, **alphas) for _ in range(count)]

    assert (
        draw_mixes(3, 5, mixup=0.8, cutmix=1.0)
        == draw_mixes(3, 5, mixup=0.8, cutmix=1.0)
        != draw_mixes(4, 5, mixup=0.8, cutmix=1.0)
    )
    shares = np.array([mix.weight for mix in draw_mixes(0, 4000, mixup=0.8, cutmix=0.0)])
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1)).
    assert abs(shares.mean() - 0.5) < 0.02 and abs(shares.var() - 1 / (4 * 2.6)) < 0.01
    both = draw_mixes(0, 2000, mixup=0.8, cutmix=1.0)
    assert 900 < sum(mix.box is None for mix in both) < 1100
    assert all(mix.box is not None for mix in draw_mixes(0, 50, mixup=0.0, cutmix=1.0))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_torchs_cross_entropy_where_nothing_is_mixed(smoothing: float) -> None:
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.tensor([0, 1, 4, 4, 2, 3])
    targets = mixed_targets(labels, num_classes=5, smoothing=smoothing, mix=NO_MIX).double()
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    torch.testing.assert_close(soft_cross_entropy(logits, targets), expected, rtol=1e-6, atol=0)
