"""Weights of Hugging Face's CLIPModel: the model computes the same function, and the export is bit-identical."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import Init
from clipmill.train.evaluation.opening import require_weights
from clipmill.train.inference import tasks_where
from clipmill.train.weights.hf_clip import from_hf, to_hf
from clipmill.train.weights.source import Source
from clipmill.train.weights.sources import open_weights
from tests.train.weights import small
from tests.train.weights.small import ignore_line, images, loaded_weights, our_model, shuffle, tokens

transformers = pytest.importorskip("transformers")


def hf_model(**changes: Any) -> Any:
    """Make a small CLIPModel with random weights and, by default, QuickGELU."""
    tower = {"num_hidden_layers": small.DEPTH, **changes}
    text = {
        "hidden_size": small.TEXT_WIDTH,
        "intermediate_size": 4 * small.TEXT_WIDTH,
        "num_attention_heads": small.TEXT_HEADS,
        "vocab_size": small.VOCABULARY,
        "max_position_embeddings": small.CONTEXT,
        "bos_token_id": 97,
        "eos_token_id": 98,
    }
    vision = {
        "hidden_size": small.WIDTH,
        "intermediate_size": 4 * small.WIDTH,
        "num_attention_heads": small.HEADS,
        "image_size": small.IMAGE_PX,
        "patch_size": small.PATCH_PX,
    }
    config = transformers.CLIPConfig(
        text_config={**text, **tower}, vision_config={**vision, **tower}, projection_dim=small.EMBEDDING
    )
    model = transformers.CLIPModel(config)
    shuffle(model, seed=5)
    return model.eval()


@pytest.fixture(scope="module")
def theirs() -> Any:
    return hf_model()


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    theirs.save_pretrained(folder)
    return folder


def open_source(path: Path) -> Source:
    source = open_weights(Init(weights=str(path)))
    assert source is not None
    return source


def test_our_towers_compute_what_clip_model_does(theirs: Any, folder: Path) -> None:
    source = open_source(folder)
    assert source.facts.activation == "quick_gelu" and "Hugging Face" in source.title
    ours = our_model(activation="quick_gelu")
    torch.nn.init.zeros_(ours.video.temporal_embedding)
    loaded = loaded_weights(ours, source, say=ignore_line)
    with torch.no_grad():
        seen = theirs(input_ids=tokens(), pixel_values=images())
        torch.testing.assert_close(ours.embed_video(images()[:, :, None]), seen.image_embeds, atol=2e-6, rtol=2e-5)
        torch.testing.assert_close(ours.embed_text(tokens()), seen.text_embeds, atol=2e-6, rtol=2e-5)
    assert loaded.logit_scale == pytest.approx(theirs.logit_scale.item())
    assert [change.kind for change in loaded.fitted.changes] == ["created"]


def test_weights_go_there_and_back_bit_by_bit(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    back = to_hf(from_hf(state).tensors)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_a_bare_file_is_known_by_its_names(theirs: Any, tmp_path: Path) -> None:
    torch.save(
        {**theirs.state_dict(), "text_model.embeddings.position_ids": torch.arange(12)[None]}, tmp_path / "w.bin"
    )
    loaded = loaded_weights(our_model(), open_source(tmp_path / "w.bin"), say=ignore_line)
    assert [change.kind for change in loaded.fitted.changes] == ["created"]


def test_a_lost_key_matrix_is_missed(theirs: Any, tmp_path: Path) -> None:
    state = theirs.state_dict()
    del state["vision_model.encoder.layers.1.self_attn.k_proj.weight"]
    torch.save(state, tmp_path / "w.bin")
    with pytest.raises(
        UserError, match=r"1 missing \(video.transformer.resblocks.1.attn.in_proj_weight\); 2 unexpected"
    ):
        loaded_weights(our_model(), open_source(tmp_path / "w.bin"), say=ignore_line)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "siglip"}, "the model type 'siglip' is not supported"),
        ({"vision_config": {"hidden_act": "gelu_new"}}, "the activations are gelu_new, quick_gelu"),
        ({"text_config": {"vocab_size": 99, "eos_token_id": 7}}, "captions end with token 7"),
    ],
)
def test_other_models_are_refused(folder: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        open_source(tmp_path)


@pytest.fixture(scope="module")
def sharded_model(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model in several files, as `save_pretrained` writes large models."""
    folder = tmp_path_factory.mktemp("sharded")
    theirs.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2 and not (folder / "model.safetensors").exists()
    return folder


def test_a_model_in_several_files_is_the_model_in_one(folder: Path, sharded_model: Path) -> None:
    whole, sharded_source = open_source(folder), open_source(sharded_model)
    assert (
        sharded_source.facts == whole.facts
        and sharded_source.converted.tensors.keys() == whole.converted.tensors.keys()
    )
    assert all(
        torch.equal(tensor, whole.converted.tensors[name]) for name, tensor in sharded_source.converted.tensors.items()
    )
    by_index = open_source(sharded_model / "model.safetensors.index.json")
    assert by_index.converted.tensors.keys() == whole.converted.tensors.keys()
    require_weights(sharded_model, tasks_where())  # the first step of train eval, train embed and load_model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_scale": "none-of-these.safetensors"}, "cannot read the weights"),
        ({"logit_scale": "../model.safetensors"}, "lists the shard '../model.safetensors'"),
        (
            {"logit_scale": "pytorch_model-00001-of-00002.bin"},
            "but shards must be .safetensors files next to the index",
        ),
        ({"logit_scale": 3}, "is not an index of weight shards"),
        ({"of_nowhere": None}, "lack 1 of the 79 listed tensors, such as of_nowhere"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(
    sharded_model: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    copy = shutil.copytree(sharded_model, tmp_path / "copy")
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"]["logit_scale"]
    content["weight_map"] |= {name: value or shard for name, value in change.items()}
    index.write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        open_source(copy)
    assert message in str(caught.value) and caught.value.hint


def test_shards_of_pickles_are_named_for_what_they_are(sharded_model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sharded_model, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors*"))
    weight_map = {"logit_scale": "pytorch_model-00001-of-00001.bin"}
    (copy / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({"logit_scale": torch.ones(())}, copy / "pytorch_model-00001-of-00001.bin")
    with pytest.raises(
        UserError, match=r"pytorch_model-00001-of-00001.bin', but shards must be .safetensors"
    ) as caught:
        open_source(copy)
    assert "save the model as safetensors" in str(caught.value.hint)
