"""Unusable values in external weights files: each is reported with its file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel

from clipmill.manifests.errors import UserError
from clipmill.train.weights.conversion import LOGIT_SCALE
from clipmill.train.weights.hf_caption import read_caption_folder
from clipmill.train.weights.loading import fit_to
from clipmill.train.weights.open_clip import to_open_clip
from tests.train.models.small_captioners import their_captioner
from tests.train.weights.small import ignore_line, our_model
from tests.train.weights.small_videomae import State, hf_autoencoder, open_source, our_autoencoder

EPS = "a number more than 0 and less than 1"
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of each transformers model."""
    root = tmp_path_factory.mktemp("models")
    clip = CLIPConfig(
        text_config={**SMALL, "vocab_size": 99, "eos_token_id": 98}, vision_config={**SMALL, "image_size": 16}
    )
    for name, model in (("clip", CLIPModel(clip)), ("videomae", hf_autoencoder()), ("caption", their_captioner())):
        model.save_pretrained(root / name)
    return {path.name: path for path in root.iterdir()}


def change_tensors(folder: Path, to: Path, state: Callable[[State], State]) -> Path:
    """Copy a folder with changed tensors."""
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(state(load_file(folder / "model.safetensors")), to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize(
    ("model", "key", "value", "kind"),
    [
        ("videomae", "layer_norm_eps", "x", EPS),
        ("videomae", "layer_norm_eps", float("nan"), EPS),
        ("videomae", "layer_norm_eps", 0, EPS),
        ("videomae", "architectures", 5, "a list of strings"),
        ("videomae", "decoder_num_attention_heads", 0, "a whole number of at least 1"),
        ("clip", "vision_config", "large", "an object"),
        ("clip", "vision_config.layer_norm_eps", [1], EPS),
        ("clip", "text_config.layer_norm_eps", -1, EPS),
        ("clip", "vision_config.hidden_act", ["gelu"], "a string"),
        ("clip", "text_config.num_attention_heads", "four", "a whole number of at least 1"),
        ("caption", "encoder.num_hidden_layers", "four", "a whole number of at least 1"),
        ("caption", "encoder.hidden_size", None, "a whole number of at least 1"),
        ("caption", "decoder.n_embd", True, "a whole number of at least 1"),
        ("caption", "decoder.layer_norm_epsilon", "x", EPS),
        ("caption", "encoder.layer_norm_eps", -1e-6, EPS),
    ],
)
def test_a_value_of_another_kind_is_named_with_its_key_and_file(
    folders: dict[str, Path], tmp_path: Path, model: str, key: str, value: Any, kind: str
) -> None:
    config = json.loads((folders[model] / "config.json").read_text())
    *parts, last = key.split(".")
    inner = config
    for part in parts:
        inner = inner[part]
    inner[last] = value
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folders[model] / "model.safetensors")
    for read in (open_source, read_caption_folder) if model == "caption" else (open_source,):
        with pytest.raises(UserError) as caught:
            read(tmp_path)
        assert str(caught.value) == f"{path}: {key} is {value!r}, but must be {kind}"


def test_three_colours_are_asked_for(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = change_tensors(folders["videomae"], tmp_path, dict)
    for value in (0.5, [0.5, 0.5], ["a", "b", "c"], [0.5, 0.5, 1e9], [0.5, 0.5, -0.1]):
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": value}))
        with pytest.raises(UserError, match=r"preprocessor_config\.json: image_mean is .*, but must be three numbers"):
            open_source(folder)


@pytest.mark.parametrize(
    "changed",
    [
        {"preprocess_cfg": {"std": [0, 0, 0]}},
        {"preprocess_cfg": {"std": [0.2, -0.2, 0.2]}},
        {"preprocess_cfg": {"mean": [1e9, 0, 0]}},
        {"model_cfg": {"vision_cfg": {"norm_kwargs": {"eps": -1}}}},
    ],
)
def test_numbers_that_no_picture_can_be_normalised_with_are_refused(tmp_path: Path, changed: Any) -> None:
    torch.save(to_open_clip(our_model().state_dict()), tmp_path / "open_clip_pytorch_model.bin")
    (tmp_path / "open_clip_config.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match=r"open_clip_config\.json: \w+cfg\..* is .*, but must be (three|a) number"):
        open_source(tmp_path)


QUERY = "videomae.encoder.layer.0.attention.attention.query.weight"


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("mask_token", torch.int32, "int32"),
        (QUERY, torch.int32, "int32"),
        (QUERY, torch.float8_e4m3fn, "float8_e4m3fn"),
        ("videomae.encoder.layer.0.attention.attention.q_bias", torch.int8, "int8"),
    ],
)
def test_quantised_tensors_are_no_weights(
    folders: dict[str, Path], tmp_path: Path, name: str, dtype: torch.dtype, message: str
) -> None:
    state = load_file(folders["videomae"] / "model.safetensors")
    theirs = next(
        tensor_name
        for tensor_name in state
        if tensor_name.endswith(name.replace("q_bias", "query.bias")) or tensor_name == name
    )
    folder = change_tensors(folders["videomae"], tmp_path, lambda state: state | {theirs: state[theirs].to(dtype)})
    with pytest.raises(UserError) as caught:
        open_source(folder)
    assert f"{folder / 'model.safetensors'}: {theirs} has dtype {message}, but weights must" in str(caught.value)


def test_positions_and_masks_are_no_weights_and_may_be_integers(folders: dict[str, Path], tmp_path: Path) -> None:
    ids = {"text_model.embeddings.position_ids": torch.arange(77)[None]}
    source = open_source(change_tensors(folders["clip"], tmp_path, lambda state: state | ids))
    assert source.converted.ignored == tuple(ids)
    half = {QUERY: torch.ones(32, 32, dtype=torch.bfloat16)}
    open_source(change_tensors(folders["videomae"], tmp_path, lambda state: state | half))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_no_start(folders: dict[str, Path], tmp_path: Path, number: float) -> None:
    def damage(state: State) -> State:
        state["mask_token"][0, 0, 3] = number
        return state

    folder = change_tensors(folders["videomae"], tmp_path, damage)
    with pytest.raises(UserError) as caught:
        fit_to(our_autoencoder(), open_source(folder), say=ignore_line)
    assert str(folder) in str(caught.value) and "mask_token contains non-finite values" in str(caught.value)
    # Tensors that the model does not use may contain any values.
    state = our_model().state_dict()
    state["text.positional_embedding"][0] = number
    torch.save(to_open_clip(state), tmp_path / "w.pt")
    tower = torch.nn.Module()
    tower.video = our_model().video
    fit_to(tower, open_source(tmp_path / "w.pt"), say=ignore_line)


def test_a_decoder_that_is_not_finite_is_no_start(folders: dict[str, Path], tmp_path: Path) -> None:
    def damage(state: State) -> State:
        state["decoder.transformer.wpe.weight"][1] = float("nan")
        return state

    with pytest.raises(
        UserError, match=r"model\.safetensors: decoder\.transformer\.wpe\.weight contains non-finite values"
    ):
        read_caption_folder(change_tensors(folders["caption"], tmp_path, damage))
    whole = {"decoder.transformer.wte.weight": torch.ones(61, 24, dtype=torch.int64)}
    with pytest.raises(UserError, match=r"decoder\.transformer\.wte\.weight has dtype int64"):
        read_caption_folder(change_tensors(folders["caption"], tmp_path, lambda state: state | whole))


@pytest.mark.parametrize(
    ("scale", "words"),
    [(torch.tensor(float("nan")), "contains non-finite values"), (torch.zeros(3), "has 3 val")],
)
def test_a_temperature_that_is_not_one_finite_number_is_the_weights_fault(
    tmp_path: Path, scale: torch.Tensor, words: str
) -> None:
    torch.save(to_open_clip({**our_model().state_dict(), LOGIT_SCALE: scale}), tmp_path / "w.pt")
    with pytest.raises(UserError, match=rf"w\.pt: logit_scale {words}"):
        open_source(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("caption", "encoder.embeddings.cls_token"),
        ("caption", "encoder.embeddings.time_embeddings"),
        ("videomae", QUERY),
        ("clip", "vision_model.encoder.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_a_tensor_without_its_dimensions_is_read_and_compared(
    folders: dict[str, Path], tmp_path: Path, model: str, name: str
) -> None:
    """The layout of a scalar tensor cannot be converted, so the table reports it as a mismatch."""
    parts = [name.replace("query", part).replace("q_proj", f"{part[0]}_proj") for part in ("query", "key", "value")]
    flat = {part: torch.tensor(1.0) for part in parts}
    source = open_source(change_tensors(folders[model], tmp_path, lambda state: state | flat))
    tensors = {**source.converted.unknown, **source.converted.tensors}
    assert [tensor for tensor in tensors.values() if not tensor.ndim and tensor == 1]
