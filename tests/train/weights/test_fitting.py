"""Differences between weights and model: which are explained, which are errors, and which the user can allow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from open_clip.model import resize_pos_embed
from safetensors.torch import save_file
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import Init
from clipmill.train.weights.conversion import ConvertedStateDict, Format, NameTable, SourceFacts, any_starts_with
from clipmill.train.weights.files import without_prefixes
from clipmill.train.weights.loading import LoadedWeights, fit_tensors, resize_positions, stretched_positions
from clipmill.train.weights.open_clip import from_open_clip, to_open_clip
from clipmill.train.weights.source import Source
from clipmill.train.weights.sources import FORMATS, detect_format, open_weights
from tests.train.weights.small import ignore_line, loaded_weights, our_model, shuffle

State = dict[str, torch.Tensor]


@pytest.fixture
def state() -> State:
    """State dict of a small CLIP."""
    model = our_model()
    shuffle(model, seed=11)
    return {**to_open_clip(model.state_dict()), "logit_scale": torch.tensor(4.6)}


def source_of(converted: ConvertedStateDict) -> Source:
    return Source(title="weights.pt (open_clip)", converted=converted, facts=SourceFacts())


def load_fitted(
    state: State, *, allow: tuple[str, ...] = (), say: Callable[[str], None] = ignore_line, **model: Any
) -> LoadedWeights:
    return loaded_weights(our_model(**model), source_of(from_open_clip(state)), allow=allow, say=say)


def without(state: State, name: str) -> State:
    return {key: value for key, value in state.items() if key != name}


BLOCK = "visual.transformer.resblocks.1.mlp.c_fc.weight"


@pytest.mark.parametrize(
    ("change", "message", "row"),
    [
        (
            lambda state: without(state, BLOCK),
            "1 missing (video.transformer.resblocks.1.mlp.c_fc.weight)",
            "MISSING video.transformer.resblocks.1.mlp.c_fc.weight 256 x 64",
        ),
        (
            lambda state: {**state, "visual.ls_1.gamma": torch.ones(64)},
            "1 unexpected (visual.ls_1.gamma)",
            "UNEXPECTED visual.ls_1.gamma",
        ),
        (
            lambda state: {**state, "head.weight": torch.ones(2, 3)},
            "1 unexpected (head.weight)",
            "UNEXPECTED head.weight",
        ),
        (
            lambda state: {**state, BLOCK: torch.ones(128, 64)},
            f"1 with a different shape ({BLOCK})",
            f"DIFFERENT SHAPE {BLOCK} 128 x 64 -> 256 x 64",
        ),
        (
            lambda state: {**state, "token_embedding.weight": torch.ones(90, 48)},
            "1 with a different shape (token_embedding.weight)",
            "DIFFERENT SHAPE token_embedding.weight",
        ),
        (
            lambda state: {**state, "positional_embedding": torch.ones(8, 48)},
            "1 with a different shape (positional_embedding)",
            "DIFFERENT SHAPE positional_embedding",
        ),
    ],
)
def test_drift_that_nothing_explains_is_an_error_with_a_table(
    state: State, change: Callable[[State], State], message: str, row: str
) -> None:
    messages: list[str] = []
    with pytest.raises(UserError) as caught:
        load_fitted(change(state), say=messages.append)
    assert message in str(caught.value) and "--init.allow" in str(caught.value.hint)
    assert any(" ".join(line.split()).startswith(row) for line in messages), messages


def test_an_mlp_of_another_width_is_not_taken_for_another_model(state: State) -> None:
    with pytest.raises(UserError) as caught:
        load_fitted({**state, BLOCK: torch.ones(128, 64)})
    assert "MLPs that are 4 times as wide as their tower" in str(caught.value.hint)


def test_the_user_may_allow_drift_by_pattern_of_either_name(state: State) -> None:
    before = our_model().state_dict()["video.transformer.resblocks.1.mlp.c_fc.weight"].clone()
    changed = {**without(state, BLOCK), "head.weight": torch.ones(2, 3)}
    fitted = load_fitted(changed, allow=("video.transformer.*.c_fc.weight", "head.*"))
    whys = {change.name: change.why for change in fitted.fitted.changes}
    assert whys["head.weight"] == "allowed by --init.allow head.*"
    assert "video.transformer.resblocks.1.mlp.c_fc.weight" not in fitted.fitted.tensors
    model = our_model()
    loaded_weights(model, source_of(from_open_clip(changed)), allow=("*",), say=ignore_line)
    assert torch.equal(model.state_dict()["video.transformer.resblocks.1.mlp.c_fc.weight"], before)
    with pytest.raises(UserError, match=r"head.weight"):
        load_fitted(changed, allow=("video.*",))


def test_an_error_leaves_the_model_as_it_was(state: State) -> None:
    model = our_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError):
        loaded_weights(model, source_of(from_open_clip(without(state, BLOCK))), say=ignore_line)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_another_architecture_is_described(state: State) -> None:
    wide = {name: torch.cat([tensor, tensor], -1) if tensor.ndim else tensor for name, tensor in state.items()}
    deeper = {name.replace("resblocks.1", "resblocks.2"): tensor for name, tensor in state.items()} | state
    with pytest.raises(UserError, match=r"video with width 128 and 2 blocks.*model: video with width 64 and 2 blocks"):
        load_fitted(wide)
    with pytest.raises(UserError, match="video with width 64 and 3 blocks, text with width 48 and 3 blocks"):
        load_fitted(deeper)


def test_another_embedding_width_learns_new_projections_and_a_new_temperature(state: State) -> None:
    from dataclasses import replace

    from tests.train.weights.small import SIZE

    model = our_model(size=replace(SIZE, embedding_width=16))
    before = model.video.proj.detach().clone()
    fitted = loaded_weights(model, source_of(from_open_clip(state)), say=ignore_line)
    assert torch.equal(model.video.proj, before) and fitted.logit_scale is None
    dropped = {change.name: change.why for change in fitted.fitted.changes if change.kind == "dropped"}
    assert dropped.keys() == {"video.proj", "text.text_projection", "logit_scale"}
    assert dropped["video.proj"] == "embedding width 16 in the model, 24 in the weights: a new projection is learned"


def test_a_model_without_a_text_tower_takes_the_video_tower_alone(state: State) -> None:
    fitted = load_fitted(state, has_text_tower=False)
    assert {change.why for change in fitted.fitted.changes if change.kind == "dropped"} == {
        "this model has no text tower"
    }


def test_positions_of_another_resolution_are_open_clips(state: State) -> None:
    positions = state["visual.positional_embedding"]

    class Theirs(nn.Module):
        def __init__(self, grid: int) -> None:
            super().__init__()
            self.visual = nn.Module()
            self.visual.grid_size = (grid, grid)  # type: ignore[assignment]

    for grid in (2, 3, 6, 9):
        theirs = {"visual.positional_embedding": positions}
        resize_pos_embed(theirs, Theirs(grid))
        ours = resize_positions(positions, num_positions=1 + grid * grid)
        assert torch.equal(ours, theirs["visual.positional_embedding"])
    fitted = load_fitted(state, image_px=48)
    (change,) = [change for change in fitted.fitted.changes if change.kind == "resized"]
    assert (change.name, change.old, change.new) == ("video.positional_embedding", (17, 64), (37, 64))


def test_a_longer_context_and_padding_of_the_vocabulary_are_cut(state: State) -> None:
    longer = {
        **state,
        "positional_embedding": torch.cat([state["positional_embedding"], torch.ones(5, 48)]),
        "token_embedding.weight": torch.cat([state["token_embedding.weight"], torch.zeros(3, 48)]),
    }
    fitted = load_fitted(longer)
    assert torch.equal(fitted.fitted.tensors["text.positional_embedding"], state["positional_embedding"])
    assert torch.equal(fitted.fitted.tensors["text.token_embedding.weight"], state["token_embedding.weight"])
    assert [change.kind for change in fitted.fitted.changes].count("resized") == 2


def test_the_report_for_run_json_names_every_change(state: State) -> None:
    fitted = load_fitted(state, num_frames=4)
    report = fitted.as_json()
    assert report["num_copied"] == len(our_model().state_dict()) - 1
    assert report["changes"] == [
        {
            "kind": "created",
            "name": "video.temporal_embedding",
            "origin": "",
            "old": None,
            "new": (4, 64),
            "why": "initialised according to --towers.temporal",
        }
    ]


def test_half_precision_becomes_the_models_own(state: State) -> None:
    model = our_model()
    half = {name: tensor.half() for name, tensor in state.items()}
    loaded_weights(model, source_of(from_open_clip(half)), say=ignore_line)
    assert model.video.proj.dtype == torch.float32
    assert torch.equal(model.video.proj, half["visual.proj"].float())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["visual.layer1.0.conv1.weight", "transformer.resblocks.0.ln_1.weight"], "contain a ResNet"),
        (["visual.trunk.blocks.0.norm1.weight", "text.transformer.resblocks.0.ln_1.weight"], "a timm tower"),
        (["encoder.weight", "decoder.weight"], "not the weights of a CLIP.*decoder.weight, encoder.weight"),
        ([], "they contain no tensors"),
    ],
)
def test_weights_of_other_kinds_are_named(names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        detect_format(names)


def test_prefixes_of_wrappers_are_taken_off_where_all_have_them() -> None:
    tensor = torch.ones(1)
    assert without_prefixes({"module._orig_mod.a": tensor, "module._orig_mod.b": tensor}).keys() == {"a", "b"}
    assert without_prefixes({"module.a": tensor, "b": tensor}).keys() == {"module.a", "b"}


def test_a_forced_format_goes_before_the_names(state: State, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "w.pt")
    source = open_weights(Init(weights=str(tmp_path / "w.pt"), format="openai"))
    assert source is not None and source.facts.activation == "quick_gelu"
    source = open_weights(Init(weights=str(tmp_path / "w.pt"), format="hf"))
    assert source is not None and len(source.converted.unknown) == len(state) - 1


def test_settings_about_no_weights_are_a_mistake() -> None:
    with pytest.raises(UserError, match="need initial weights"):
        Init(format="avion")
    with pytest.raises(UserError, match=r"--init\.pixel-std"):
        Init(pixel_std=(0.0, 1.0, 1.0))


def test_a_format_is_a_file_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format adds names, concatenated tensors, a different layout and a configuration, with no change elsewhere."""
    block = "video.transformer.resblocks.N"
    names = NameTable(
        owner="Toy",
        names={f"{block}.attn.in_proj_*": "toy.N.{q,k,v}.*", f"{block}.mlp.c_fc.*": "toy.N.fc.*"},
        ignored=("steps",),
        to_ours=lambda name, tensor: tensor.T if name.endswith("c_fc.weight") else tensor,
        to_theirs=lambda name, tensor: tensor.T if name.endswith("c_fc.weight") else tensor,
    )
    toy = Format(
        name="toy",
        title="Toy",
        convert=names.read,
        matches=lambda names: any_starts_with(names, "toy."),
        model_types=("toy-*",),
        read_config=lambda config, preprocess, *, source: SourceFacts(video_heads=config["heads"]),
    )
    monkeypatch.setitem(FORMATS, "toy", toy)
    state = {f"toy.3.{part}.bias": torch.full((2,), float(index)) for index, part in enumerate("qkv")}
    state |= {
        "toy.3.fc.weight": torch.arange(6.0).view(2, 3),
        "toy.steps": torch.tensor(9),
        "toy.3.q.weight": torch.ones(2),
    }
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "toy-large", "heads": 5}')
    source = open_weights(Init(weights=str(tmp_path)))
    assert source is not None and source.title.endswith("(Toy)") and source.facts.video_heads == 5
    converted = source.converted
    assert converted.tensors["video.transformer.resblocks.3.attn.in_proj_bias"].tolist() == [0, 0, 1, 1, 2, 2]
    assert converted.origins["video.transformer.resblocks.3.attn.in_proj_bias"] == "toy.3.{q,k,v}.bias"
    assert converted.tensors["video.transformer.resblocks.3.mlp.c_fc.weight"].shape == (3, 2)
    assert converted.ignored == ("toy.steps",) and converted.unknown.keys() == {"toy.3.q.weight"}
    back = names.write(converted.tensors)
    assert back.keys() == state.keys() - {"toy.steps", "toy.3.q.weight"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.items())
    with pytest.raises(ValueError, match=r"Toy has no parameter for video\.proj"):
        names.write({"video.proj": torch.ones(1)})


def test_positions_of_texts_are_stretched_as_in_long_clip() -> None:
    """Stretch text positions as Zhang et al. 2024 do.

    The first 20 of 77 positions stay, and each other position is followed by three interpolated ones, 248 in total.
    """
    old = torch.randn(77, 5, dtype=torch.float64)
    expected = [*old[:20]]
    for number in range(20, 77):
        begin = min(number, 75)  # beyond the last position, extrapolate the line through the last two
        slope = old[begin + 1] - old[begin]
        expected += [old[number] + slope * quarter / 4 for quarter in range(4)]
    torch.testing.assert_close(stretched_positions(old, 248), torch.stack(expected), rtol=0, atol=1e-12)
    assert torch.equal(stretched_positions(old, 248)[20::4], old[20:])
    source = ConvertedStateDict(
        tensors={"text.positional_embedding": old}, origins={"text.positional_embedding": "positional_embedding"}
    )
    fitted = fit_tensors(source, {"text.positional_embedding": (248, 5)})
    assert torch.equal(fitted.tensors["text.positional_embedding"], stretched_positions(old, 248))
    assert "stretched, as in Long-CLIP" in fitted.changes[0].why
