"""Towers from libraries compute the output of their library for one frame, in float64 with random weights."""

from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
from transformers import AutoTokenizer

from clipmill.train.config.model import DualEncoderTowers
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.dual_encoder import DualEncoder, size_of
from clipmill.train.models.hugging_face import PADDING
from clipmill.train.models.library_towers import tokenizer_of
from clipmill.train.weights.library import library_format
from tests.train.library.small_library import CLIP, PX, RESNET, SIGLIP2, save_hf

TEXTS = ["a dog catches a frisbee", "two people talk"]


def pictures(num: int) -> torch.Tensor:
    return torch.randn(num, 3, PX, PX, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def encoder(state: dict[str, torch.Tensor], *, num_frames: int = 1, **towers: object) -> DualEncoder:
    """Make a dual encoder from the weights of a library model, which must all be used."""
    named = DualEncoderTowers(**towers)  # type: ignore[arg-type]
    form = library_format(named)
    assert form is not None
    converted = form.convert(state)
    assert not converted.unknown
    model = DualEncoder(
        size_of("tiny", named),
        image_px=PX,
        num_frames=num_frames,
        attend=attend_with_sdpa,
        towers=named,
        has_text_tower=named.text is not None,
    ).double()
    left = model.load_state_dict(converted.tensors, strict=False)
    assert set(left.unexpected_keys) <= {"logit_scale"}
    assert not [name for name in left.missing_keys if not name.endswith(("num_batches_tracked", "position_ids"))]
    return model.eval()


def unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


def assert_equal_to_unit(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, unit(theirs), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", [RESNET, SIGLIP2, CLIP])
def test_both_towers_of_open_clip_are_its_own(models: Path, name: str) -> None:
    torch.manual_seed(0)
    theirs = open_clip.create_model(name, precision="fp32").double().eval()
    ours = encoder(theirs.state_dict(), image=f"open_clip:{name}", text=f"open_clip:{name}")
    tokens = open_clip.get_tokenizer(name)(TEXTS)
    tokenize = tokenizer_of(f"open_clip:{name}", tokens.shape[1])
    assert torch.equal(torch.stack([torch.from_numpy(tokenize(text)) for text in TEXTS]), tokens)
    with torch.no_grad():
        assert_equal_to_unit(ours.embed_video(pictures(2)[:, :, None]), theirs.encode_image(pictures(2)))
        assert_equal_to_unit(ours.embed_text(tokens), theirs.encode_text(tokens))


@pytest.mark.parametrize("name", ["tiny_siglip", "tiny_pe", "resnet10t"])
def test_an_image_tower_of_timm_is_its_own(name: str) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model(name, **({"num_classes": 0} if name == "resnet10t" else {})).double().eval()
    ours = encoder(theirs.state_dict(), image=f"timm:{name}")
    with torch.no_grad():
        assert_equal_to_unit(ours.embed_video(pictures(2)[:, :, None]), theirs(pictures(2)))


@pytest.mark.parametrize("kind", ["clip", "siglip", "siglip2"])
def test_both_halves_of_a_model_of_transformers_are_its_own(tmp_path: Path, kind: str) -> None:
    theirs = save_hf(tmp_path / kind, kind).double()
    ours = encoder(theirs.state_dict(), image=f"hf:{tmp_path / kind}", text=f"hf:{tmp_path / kind}")
    tokenize = tokenizer_of(f"hf:{tmp_path / kind}", 16)
    tokens = torch.stack([torch.from_numpy(tokenize(text)) for text in TEXTS])
    how = {"padding": "max_length", "truncation": True, "max_length": 16}
    padded = AutoTokenizer.from_pretrained(tmp_path / kind)(TEXTS, **how)["input_ids"]
    given = {"pixel_values": pictures(2)}
    if kind == "siglip2":
        from transformers.models.siglip2.image_processing_pil_siglip2 import convert_image_to_patches

        patches = [convert_image_to_patches(picture.numpy(), 8) for picture in pictures(2)]
        given = {"pixel_values": torch.stack(list(map(torch.from_numpy, patches)))}
        given |= {
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[4, 4]] * 2),
        }
    with torch.no_grad():
        outputs = theirs(input_ids=torch.tensor(padded), **given)
        assert_equal_to_unit(ours.embed_video(pictures(2)[:, :, None]), outputs.image_embeds)
        assert_equal_to_unit(ours.embed_text(tokens), outputs.text_embeds)


def test_an_encoder_of_texts_is_pooled_without_its_padding(tmp_path: Path) -> None:
    theirs = save_hf(tmp_path / "bert", "bert").double()
    save_hf(tmp_path / "dino", "dinov2")
    tokenizer = tokenizer_of(f"hf:{tmp_path / 'bert'}", 16)
    tokens = torch.stack([torch.from_numpy(tokenizer(text)) for text in TEXTS])
    with torch.no_grad():
        for pooling, of in {
            "mean": lambda x: x.mean(1),
            "first": lambda x: x[:, 0],
            "last": lambda x: x[:, -1],
        }.items():
            named: dict[str, Any] = {"text": f"hf:{tmp_path / 'bert'}", "text_pooling": pooling}
            state = {f"text_model.{name}": tensor for name, tensor in theirs.state_dict().items()}
            ours = (
                DualEncoder(
                    size_of("tiny", DualEncoderTowers(**named)),
                    image_px=PX,
                    num_frames=1,
                    attend=attend_with_sdpa,
                    towers=DualEncoderTowers(**named),
                )
                .double()
                .eval()
            )
            form = library_format(DualEncoderTowers(**named))
            assert form is not None and ours.text is not None
            ours.load_state_dict(form.convert(state).tensors, strict=False)
            for row, text_L in enumerate(tokens):
                alone = theirs(input_ids=text_L[None, : int((text_L != PADDING).sum())]).last_hidden_state
                assert_equal_to_unit(ours.embed_text(tokens)[row : row + 1], of(alone))


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_a_clip_is_the_mean_of_its_frames_at_first(tmp_path: Path, pooling: str) -> None:
    theirs = save_hf(tmp_path, "dinov2").double()
    named = DualEncoderTowers(image=f"hf:{tmp_path}", pool_frames=pooling)  # type: ignore[arg-type]
    model = (
        DualEncoder(
            size_of("tiny", named),
            image_px=PX,
            num_frames=3,
            attend=attend_with_sdpa,
            towers=named,
            has_text_tower=False,
        )
        .double()
        .eval()
    )
    model.video.model.load_state_dict(theirs.state_dict())
    clips = pictures(6).unflatten(0, (2, 3)).transpose(1, 2)
    with torch.no_grad():
        frames = theirs(pictures(6))
        assert_equal_to_unit(model.embed_video(clips), frames.pooler_output.unflatten(0, (2, 3)).mean(1))
        tokens = model.video.tokens(clips)
        torch.testing.assert_close(tokens, frames.last_hidden_state.unflatten(0, (2, 3)).flatten(1, 2))
    if pooling == "attention":
        (model.embed_video(clips) * torch.randn(2, 32)).sum().backward()
        assert model.video.pool is not None and model.video.pool.query.grad is not None
        assert model.video.pool.query.grad.abs().max() > 0
