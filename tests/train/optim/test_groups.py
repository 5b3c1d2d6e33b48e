"""Parameter groups: which parameters decay, and the learning rate of each layer."""

import copy

import pytest
import torch
from torch import nn

from clipmill.train.config.model import Towers, frozen_part
from clipmill.train.losses.objective import Objective
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.dual_encoder import SIZES, DualEncoder, size_of
from clipmill.train.models.videomae import MaskedAutoencoder
from clipmill.train.optim.parameters import freeze, layers_above, parameter_groups, plain_name
from clipmill.train.tasks.classify.task import VideoClassifier

pytestmark = pytest.mark.usefixtures("complete_tiny")


class Temperature(Objective):
    def __init__(self) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.tensor(0.07))


@pytest.fixture(scope="module")
def model() -> DualEncoder:
    return DualEncoder(SIZES["tiny"], image_px=32, num_frames=2, attend=attend_with_sdpa)


def groups_by_name(model: nn.Module, objective: nn.Module, *, layer_decay: float) -> dict[str, dict[str, float]]:
    groups = parameter_groups(model, objective, weight_decay=0.2, layer_decay=layer_decay, adapts_all=False)
    names = {id(parameter): name for module in (model, objective) for name, parameter in module.named_parameters()}
    return {names[id(param)]: group for group in groups for param in group["params"]}


def test_matrices_decay_and_gains_biases_embeddings_and_temperature_do_not(model: DualEncoder) -> None:
    group_of = groups_by_name(model, Temperature(), layer_decay=1.0)
    assert group_of.keys() == {*dict(model.named_parameters()), "tau"}
    free = {name for name, group in group_of.items() if group["weight_decay"] == 0}
    matrices = ("proj.weight", "fc.weight", "proj_weight", "conv1.weight", "text_projection", "video.proj")
    for name, group in group_of.items():
        assert (name in free) != name.endswith(matrices), name
        assert group["adapts"] == (name not in free)
        assert group["is_objective"] == (name == "tau")
        assert group["lr_scale"] == 1
    assert {"video.temporal_embedding", "video.positional_embedding", "text.token_embedding.weight"} <= free
    assert len(parameter_groups(model, Objective(), weight_decay=0.2, layer_decay=1.0, adapts_all=True)) == 2


def test_each_block_learns_slower_than_the_one_above_it(model: DualEncoder) -> None:
    group_of = groups_by_name(model, Temperature(), layer_decay=0.5)
    scale_of = {name: group["lr_scale"] for name, group in group_of.items()}
    expected = {
        "tau": 1.0,
        "video.proj": 1.0,
        "video.ln_post.weight": 1.0,
        "text.text_projection": 1.0,
        "text.ln_final.bias": 1.0,
        "video.transformer.resblocks.3.ln_1.bias": 0.5,
        "video.transformer.resblocks.0.mlp.c_fc.weight": 0.5**4,
        "video.conv1.weight": 0.5**5,
        "video.class_embedding": 0.5**5,
        "video.temporal_embedding": 0.5**5,
        "video.ln_pre.weight": 0.5**5,
        # Layers of a shallower tower are counted from its own last layer.
        "text.transformer.resblocks.1.attn.in_proj_weight": 0.5,
        "text.transformer.resblocks.0.attn.in_proj_weight": 0.25,
        "text.token_embedding.weight": 0.125,
    }
    assert {name: scale_of[name] for name in expected} == expected
    for name, group in group_of.items():
        assert group["weight_decay"] == (0.0 if name == "tau" or "bias" in name or "ln_" in name else 0.2) or (
            "embedding" in name
        )


def test_a_tower_in_part_keeps_the_rates_of_the_whole(model: DualEncoder) -> None:
    """Frozen first blocks and blocks of other pipeline stages also count as layers."""
    whole = groups_by_name(model, Temperature(), layer_decay=0.5)
    part = copy.deepcopy(model)
    freeze(part, [frozen_part("blocks:1")])
    for number in (2, 3):
        for name, _ in list(part.video.transformer.resblocks[number].named_parameters()):
            owner, _, leaf = name.rpartition(".")
            part.video.transformer.resblocks[number].get_submodule(owner).register_parameter(leaf, None)
    part_groups = groups_by_name(part, Temperature(), layer_decay=0.5)
    kept = {name for name, parameter in part.named_parameters() if parameter.requires_grad}
    assert part_groups.keys() == {*kept, "tau"}
    assert {name.split(".")[3] for name in kept if name.startswith("video.transformer.")} == {"1"}
    assert not any(name.startswith(("video.conv1", "video.ln_pre", "video.class")) for name in kept)
    for name, group in part_groups.items():
        assert group["lr_scale"] == whole[name]["lr_scale"], name


def test_a_masked_autoencoder_has_two_towers_without_decay_of_biases_and_mask_token() -> None:
    towers = Towers(kind="videomae")
    model = MaskedAutoencoder(
        size_of("tiny", towers).video,
        decoder_depth=2,
        image_px=32,
        num_frames=2,
        attend=attend_with_sdpa,
        towers=towers,
    )
    group_of = groups_by_name(model, Objective(), layer_decay=0.5)
    free = {name for name, group in group_of.items() if group["weight_decay"] == 0}
    assert free == {name for name in group_of if name.endswith("bias") or "ln_" in name or "mask_token" in name}
    assert {"video.transformer.resblocks.0.attn.q_bias", "video.conv1.bias", "decoder.mask_token"} <= free
    expected = {
        "video.ln_post.weight": 0,
        "video.transformer.resblocks.3.attn.v_bias": 1,
        "video.transformer.resblocks.0.attn.in_proj_weight": 4,
        "video.conv1.bias": 5,
        "decoder.head.weight": 0,
        "decoder.transformer.resblocks.1.ln_1.weight": 1,
        "decoder.embed.weight": 3,
        "decoder.mask_token": 3,
    }
    assert {name: group_of[name]["lr_scale"] for name in expected} == {n: 0.5**h for n, h in expected.items()}


def test_a_classifier_of_a_videomae_tower_has_its_norm_and_head_at_the_top() -> None:
    towers = Towers(kind="videomae")
    model = VideoClassifier(
        size_of("tiny", towers).video,
        towers=towers,
        image_px=32,
        num_frames=2,
        num_classes=3,
        dropout=0.0,
        attend=attend_with_sdpa,
    )
    above = layers_above(name for name, _ in model.named_parameters())
    assert {above[name] for name in ("fc_norm.weight", "fc_norm.bias", "head.weight", "head.bias")} == {0}
    assert (above["video.conv1.weight"], above["video.transformer.resblocks.3.attn.q_bias"]) == (5, 1)


def test_layers_are_counted_in_any_tower() -> None:
    names = [
        "encoder.patch_embed.proj.weight",
        "encoder.mask_token",
        "encoder.blocks.0.fc1.weight",
        "encoder.blocks.11.fc1.weight",
        "encoder.norm.weight",
        "decoder.layers.1.fc1.weight",
        "head.weight",
    ]
    assert list(layers_above(names).values()) == [13, 13, 12, 1, 0, 1, 0]
    assert list(layers_above(["conv1.weight", "blocks.0.w", "blocks.1.w", "head.bias"]).values()) == [3, 2, 1, 0]
    assert layers_above(["linear.weight"]) == {"linear.weight": 0}


def test_wrappers_do_not_change_a_name(model: DualEncoder) -> None:
    name = "module.video.transformer.resblocks.0._checkpoint_wrapped_module.attn._orig_mod.in_proj_bias"
    assert plain_name(name) == "video.transformer.resblocks.0.attn.in_proj_bias"
    wrapped = nn.ModuleDict({"module": model})
    plain, wrapped_groups = (groups_by_name(module, Objective(), layer_decay=0.5) for module in (model, wrapped))
    assert {name: group["lr_scale"] for name, group in plain.items()} == {
        plain_name(name): group["lr_scale"] for name, group in wrapped_groups.items()
    }
