"""Settings of the towers: rejected values and their messages."""

from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import DualEncoderTowers, ModelName, Towers, check_num_frames, kind_of, tubelet_of
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"tubelet": 0}, "--towers.tubelet is 0"),
        ({"embedding_width": 0}, "--towers.embedding-width is 0"),
        ({"patch_dropout": 1.0}, "--towers.patch-dropout is 1.0"),
        ({"patch_dropout": float("nan")}, "--towers.patch-dropout is nan"),
        ({"drop_path": -0.1}, "--towers.drop-path is -0.1"),
        ({"video_norm_eps": 0.0}, "--towers.video-norm-eps is 0.0"),
        ({"kind": "videomae", "embedding_width": 64}, "--towers.embedding-width 64 does not apply to a videomae tower"),
        ({"kind": "videomae", "patch_dropout": 0.5}, "--towers.patch-dropout 0.5 does not apply to a videomae tower"),
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Towers(**wrong)


@pytest.mark.parametrize(
    "model, size_px, hint",
    [("b16", 100, "multiple of 16"), ("l14", 240, "multiple of 14"), ("l14", 16, "multiple of 14")],
)
def test_pictures_must_suit_the_patch_of_the_model(model: ModelName, size_px: int, hint: str) -> None:
    with pytest.raises(UserError, match=f"--size-px {size_px} is not a multiple of") as caught:
        DualEncoderSettings(model=model, size_px=size_px)
    assert hint in (caught.value.hint or "")
    assert DualEncoderSettings(model="l14", size_px=238).size_px == 238


def test_a_name_with_a_size_wants_that_size() -> None:
    with pytest.raises(UserError, match="--model l14-336 is l14 for frames of 336 px") as caught:
        DualEncoderSettings(model="l14-336")
    assert "--size-px 336" in (caught.value.hint or "")
    assert DualEncoderSettings(model="l14-336", size_px=336).model == "l14-336"


def test_clips_must_be_whole_cubes() -> None:
    with pytest.raises(UserError, match="--num-frames 4 is not a multiple of 3"):
        DualEncoderSettings(towers=DualEncoderTowers(tubelet=3))


def test_what_is_left_out_depends_on_the_kind() -> None:
    plain, videomae = Towers(), Towers(kind="videomae")
    assert [(kind_of(towers), tubelet_of(towers)) for towers in (plain, videomae)] == [("clip", 1), ("videomae", 2)]
    assert (tubelet_of(Towers(tubelet=2)), tubelet_of(Towers(kind="videomae", tubelet=1))) == (2, 1)
    check_num_frames(plain, num_frames=3)
    with pytest.raises(UserError, match="--num-frames 3 is not a multiple of 2"):
        check_num_frames(videomae, num_frames=3)
    trunks = [size_of("tiny", towers).video.trunk for towers in (plain, videomae, Towers(video_norm_eps=1e-6))]
    assert [(trunk.norm_eps, trunk.has_key_bias) for trunk in trunks] == [(1e-5, True), (1e-12, False), (1e-6, True)]


def test_stored_embeddings_have_their_width() -> None:
    with pytest.raises(UserError, match=r"--towers.embedding-width is 256"):
        DualEncoderSettings(input="latents", text_tower="frozen", towers=DualEncoderTowers(embedding_width=256))
