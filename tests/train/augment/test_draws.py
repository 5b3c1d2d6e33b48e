from dataclasses import fields, replace

import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.augment.model_input import MAX_SIGMA_PX, MIN_SIGMA_PX, Draw, draw_parameters
from clipmill.train.config.clips import Augment

SETTINGS = Augment(flip=0.5, brightness=0.4, contrast=0.3, saturation=1.5, hue=0.1, blur=0.25, rand_ops=2, erase=1.0)


def values(drawn: Draw) -> np.ndarray:
    columns = [getattr(drawn, field.name).astype(float) for field in fields(Draw)]
    return np.concatenate([column.reshape(len(column), -1) for column in columns], axis=1)


def test_a_draw_depends_on_the_seed_and_the_position_alone() -> None:
    positions = np.array([10**12, 3, 77, 4])
    together = values(draw_parameters(positions, SETTINGS, seed=5))
    alone = np.concatenate([values(draw_parameters(positions[[i]], SETTINGS, seed=5)) for i in range(4)])
    np.testing.assert_array_equal(together, alone)
    assert (values(draw_parameters(positions, SETTINGS, seed=6)) != together).any(axis=1).all()


def test_draws_have_the_ranges_and_the_shares_that_were_asked_for() -> None:
    drawn = draw_parameters(np.arange(100_000), SETTINGS, seed=0)
    for name, low, high in (
        ("brightness", 0.6, 1.4),
        ("contrast", 0.7, 1.3),
        ("saturation", 0.0, 2.5),
        ("hue", -0.1, 0.1),
    ):
        drawn_values = getattr(drawn, name)
        assert drawn_values.min() >= np.float32(low) and drawn_values.max() <= np.float32(high), name
        assert abs(drawn_values.mean() - (low + high) / 2) < 0.01 * (high - low), name
        assert drawn_values.std() == pytest.approx((high - low) / 12**0.5, rel=0.02), name
    sigmas = drawn.blur_sigma_px[drawn.blur_sigma_px > 0]
    assert sigmas.min() >= np.float32(MIN_SIGMA_PX) and sigmas.max() <= np.float32(MAX_SIGMA_PX)
    assert len(sigmas) == pytest.approx(25_000, abs=600)
    assert drawn.flip.sum() == pytest.approx(50_000, abs=700)


def test_what_is_drawn_for_one_change_says_nothing_about_another() -> None:
    positions = np.arange(100_000)
    drawn = draw_parameters(positions, SETTINGS, seed=0)
    # Height and width of a box are correlated, so the comparison uses only one part of the box.
    single = replace(drawn, box=drawn.box[:, 2:])
    sequences = [
        *values(single).T,
        drawn.brightness[np.r_[1:100_000, 0]],
        draw_parameters(positions, SETTINGS, seed=1).brightness,
    ]
    correlations = np.corrcoef(np.stack(sequences)) - np.eye(len(sequences))
    # Sigma is 0 where there is no blur, but it must not correlate with anything else.
    assert np.abs(correlations).max() < 0.02


def test_nothing_is_changed_by_default() -> None:
    drawn = draw_parameters(np.arange(1000), Augment(), seed=0)
    assert not drawn.flip.any() and not drawn.hue.any() and not drawn.blur_sigma_px.any()
    assert not drawn.operation.size and not drawn.box.any()
    assert (drawn.brightness == 1).all() and (drawn.contrast == 1).all() and (drawn.saturation == 1).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flip", 1.5),
        ("blur", -0.1),
        ("hue", 0.6),
        ("brightness", -1.0),
        ("contrast", float("nan")),
        ("flip", float("nan")),
        ("erase", 2.0),
        ("rand_ops", -1),
        ("rand_magnitude", 11.0),
        ("rand_std", float("inf")),
    ],
)
def test_a_setting_that_means_nothing_is_named(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"--augment.{name.replace('_', '-')} is {value}"):
        Augment(**{name: value})  # type: ignore[arg-type]
