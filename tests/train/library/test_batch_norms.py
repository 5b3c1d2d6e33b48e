"""Buffers that training updates: each microbatch updates them once, and buffers of frozen parts do not change."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from clipmill.train.config.model import frozen_part
from clipmill.train.data.batch import Batch
from clipmill.train.distributed.world import Step, World
from clipmill.train.engine.metrics import Throughput
from clipmill.train.losses.contrastive import build_contrast
from clipmill.train.losses.settings import Loss
from clipmill.train.models.library_towers import LibraryTower
from clipmill.train.optim import parameters
from clipmill.train.optim.ema import Ema
from tests.train.library.conftest import TINY
from tests.train.library.small_library import RESNET
from tests.train.running import losses, steps, train
from tests.train.tuning.runs import kill_copy, stored_names, weights

Tensors = dict[str, torch.Tensor]


SMALL: Any = {"num_classes": 8, "stem_width": 8, "channels": (8, 16, 24, 32)}


class TwoTowers(nn.Module):
    """A small timm ResNet, and a text tower with batch norm, spectral norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.video = LibraryTower("timm:resnet10t", timm.create_model("resnet10t", **SMALL))
        linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 12))
        self.text = nn.Sequential(linear, nn.BatchNorm1d(12), nn.Dropout(0.3), nn.ReLU(), nn.Linear(12, 8))
        self.double()

    def forward(self, pictures: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.normalize(self.video.model(pictures)), nn.functional.normalize(self.text(text))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 3, 32, 32).double(), torch.randn(6, 6).double()


def state_of(model: nn.Module) -> Tensors:
    gradients = {
        f"{name}.grad": parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return {name: tensor.detach().clone() for name, tensor in {**model.state_dict(), **gradients}.items()}


def differing_names(actual: Tensors, expected: Tensors) -> list[str]:
    assert actual.keys() == expected.keys()
    return [name for name, tensor in actual.items() if not torch.equal(tensor, expected[name])]


def leave_plain(model: TwoTowers) -> TwoTowers:
    return model


def compile_layer(model: TwoTowers) -> TwoTowers:
    torch._dynamo.reset()
    model.video.model.layer1.compile(backend="eager")  # type: ignore[union-attr, operator]
    return model


@pytest.mark.parametrize("prepare", [leave_plain, pytest.param(compile_layer, marks=pytest.mark.nightly)])
def test_a_count_of_flops_leaves_the_tensors_and_generators_of_a_step(
    prepare: Callable[[TwoTowers], TwoTowers],
) -> None:
    states, calls, num_flops = list[Tensors](), [0, 0], 0
    for number in range(2):
        model = prepare(TwoTowers())

        def note(*_: object, number: int = number) -> None:
            calls[number] += 1

        if prepare is leave_plain:  # inside a compiled model, hooks would also see its additional pass
            model.text.register_forward_hook(note)
        throughput = Throughput(device=torch.device("cpu"), precision="fp32")
        torch.manual_seed(5)
        if number:
            with throughput.count_flops(model):
                video, text = model(*inputs())
                (video * text).sum().backward()
            num_flops = throughput.flops_per_step or 0
        else:
            video, text = model(*inputs())
            (video * text).sum().backward()
        states.append({**state_of(model), "generator": torch.get_rng_state()})
        assert not model._forward_pre_hooks and not model._forward_hooks
    assert differing_names(*states) == []
    assert calls[0] == calls[1] and num_flops > 10**6


@pytest.mark.parametrize("microbatch", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_gradcache_changes_statistics_as_plain_passes_over_its_microbatches(microbatch: int) -> None:
    model, (pictures, text) = TwoTowers(), inputs()
    reference = deepcopy(model)
    ids = torch.arange(6)
    batch = Batch(input="pixels", video=pictures, text=text, clip_id=ids, caption_id=ids)
    objective = build_contrast(
        Loss(), inputs=lambda batch: (batch["video"], batch["text"]), dataset=None, world=World()
    )
    for number in (1, 2):
        step = Step(number=number, microbatch=microbatch)
        model.zero_grad()
        reference.zero_grad()
        loss = objective.double().backward(model, batch, step)["loss"]
        parts = []
        for part, begin in enumerate(range(0, 6, microbatch)):
            with step.seed_generators(part):
                parts.append(reference(pictures[begin : begin + microbatch], text[begin : begin + microbatch]))
        videos, texts = (torch.cat(side) for side in zip(*parts, strict=True))
        assert objective.logit_scale is not None
        logits = videos @ texts.T * objective.logit_scale.detach().exp()
        expected = (nn.functional.cross_entropy(logits, ids) + nn.functional.cross_entropy(logits.T, ids)) / 2
        expected.backward()
        torch.testing.assert_close(torch.as_tensor(loss), expected.detach(), rtol=1e-9, atol=0)
        ours, theirs = state_of(model), state_of(reference)
        assert differing_names(ours, theirs) == [] or all(
            name.endswith(".grad") for name in differing_names(ours, theirs)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)
    assert model.text[1].num_batches_tracked == 2 * -(-6 // microbatch)


def test_recomputed_activations_change_no_statistics() -> None:
    states = []
    for recomputes in (False, True):
        model = TwoTowers()
        if recomputes:
            model.video.checkpoint()
        for _ in range(2):
            video, text = model(*inputs())
            (video * text).sum().backward()
        states.append(state_of(model))
    assert differing_names(*states) == []


def test_frozen_modules_are_in_evaluation_mode_whenever_the_model_is_trained() -> None:
    model = TwoTowers()
    parameters.freeze(model, [frozen_part("text")])
    model.video.model.bn1.requires_grad_(False)
    model.eval()
    parameters.set_training_mode(model)
    in_evaluation = {name for name, module in model.named_modules() if not module.training}
    text = {"text", *(f"text.{name}" for name, _ in model.text.named_modules() if name)}
    assert in_evaluation == text | {"video.model.bn1", "video.model.bn1.drop", "video.model.bn1.act"} & {
        name for name, _ in model.named_modules()
    }
    before = state_of(model)
    model(*inputs())[0].sum().backward()
    after = {name: tensor for name, tensor in state_of(model).items() if not name.endswith(".grad")}
    changed = differing_names(after, before)
    assert changed and not any(name.startswith(("text.", "video.model.bn1.")) for name in changed)


def test_statistics_are_averaged_with_the_weights_that_they_are_of() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    ema = Ema(model, decay=0.5)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    for step in range(1, 4):
        model(torch.randn(8, 2).double() + step)
        decay = min(0.5, (1 + step) / (10 + step))
        ema.update(model, step=step)
        expected = {name: decay * tensor + (1 - decay) * model.state_dict()[name] for name, tensor in expected.items()}
    torch.testing.assert_close(ema.state_dict(), expected)
    with ema.swap_in(model):
        torch.testing.assert_close(model[1].running_mean, expected["1.running_mean"])


def run(out: Path, data_dir: Path, *flags: Any) -> Tensors:
    given = ("--towers.image", f"open_clip:{RESNET}", "--lr", "1e-2", "--checkpoint-every", 1, "--steps", 2)
    assert train("dual-encoder", *TINY, *given, *flags, "--shards", data_dir, "--out", out) == 0
    return weights(out)


@pytest.fixture(scope="module")
def trained_run(models: Path, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("norms") / "run"
    run(out, data_dir, "--microbatch", 2, "--optimizer.ema", 0.5, "--evaluate.every", 1)
    return out


def test_a_resumed_run_of_a_resnet_ends_with_the_bits_of_the_undisturbed_one(trained_run: Path, tmp_path: Path) -> None:
    again = kill_copy(trained_run, tmp_path / "again")
    assert train("dual-encoder", "--resume", "--out", again) == 0
    assert losses(again) == losses(trained_run)
    assert differing_names(weights(again), weights(trained_run)) == []
    evaluated = [{name: line for name, line in steps(out)[-1].items() if "/" in name} for out in (again, trained_run)]
    assert evaluated[0] == evaluated[1] != {}
    assert "video.model.bn1.running_mean" in stored_names(trained_run, "ema.")
    # There is one update per microbatch: two microbatches of 2 samples in each of two steps.
    assert weights(trained_run)["video.model.bn1.num_batches_tracked"] == 4


def test_a_frozen_resnet_is_the_same_to_the_bit(trained_run: Path, data_dir: Path, tmp_path: Path) -> None:
    flags = ("--init.weights", trained_run, "--freeze", "video", "--evaluate.every", 1)
    after, before = run(tmp_path / "frozen", data_dir, *flags), weights(trained_run)
    tower = {name for name in after if name.startswith("video.model.") and "num_batches" not in name}
    assert len(tower) > 60 and [name for name in tower if not torch.equal(after[name], before[name])] == []
    assert after["video.model.bn1.num_batches_tracked"] == 0
