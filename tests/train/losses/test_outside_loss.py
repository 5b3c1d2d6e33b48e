"""A loss from another package, written as a function; docs/losses.md shows its file."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clipmill_example import decoupled
from torch.nn import functional

from clipmill.manifests.errors import UserError
from clipmill.train.distributed.world import Step, World
from clipmill.train.losses.contrastive import AutogradObjective, Pairs
from clipmill.train.losses.in_batch import info_nce
from clipmill.train.losses.settings import LOSSES, Loss, LossSpec
from tests.plugins import declare, installed_here
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.losses.pairs import Table, Towers, batch_of, objective_of, settings_of
from tests.train.losses.runs import Results, run_outside, run_outside_rank
from tests.train.running import steps, train

METRICS = ("batch_accuracy", "temperature")


@pytest.fixture
def _install(tmp_path: Path) -> Iterator[None]:
    declare(tmp_path, "clipmill-example", {"losses": {"decoupled": "clipmill_example.decoupled:DECOUPLED"}})
    with installed_here(tmp_path):
        yield


def plain_autograd() -> Results:
    """Return the results of `run_outside`, computed without clipmill.

    The formula is written out pair by pair, in one graph over all towers.
    """
    towers, log_scale = Towers(dropout=0.0), torch.tensor(math.log(8), dtype=torch.float64, requires_grad=True)
    parameters = {**dict(towers.named_parameters()), "logit_scale": log_scale}
    results = {}
    for number in range(3):
        batch = batch_of(number)
        video, text = towers(batch["latents"], batch["text"])
        total = log_scale.new_zeros(())
        for i in range(6):
            others = [j for j in range(6) if j != i]
            for row in ([video[i] @ text[j] for j in others], [video[j] @ text[i] for j in others]):
                total = total + torch.stack([(log_scale.exp() * s).exp() for s in row]).sum().log() / 2
            total = total - log_scale.exp() * (video[i] @ text[i])
        loss = total / 6
        results[f"decoupled/{number}/loss"] = loss.detach()
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            results[f"decoupled/{number}/{name}"] = gradient
            parameter.data -= 0.05 * gradient
        log_scale.data.clamp_(0, math.log(100))
    return results | {"decoupled/last/logit_scale": log_scale.detach()}


@pytest.mark.usefixtures("_install")
def test_two_ranks_with_microbatches_are_one_process_and_plain_autograd(tmp_path: Path) -> None:
    """Metrics and the gradients of towers and temperature are equal over three steps."""
    end_well(fork_ranks(run_outside_rank, tmp_path, size=2, folder=tmp_path))
    ranks = torch.load(tmp_path / "results.pt", weights_only=True)
    plain = plain_autograd()
    for outcome in (run_outside(World(), microbatch=None), run_outside(World(), microbatch=4), ranks):
        assert set(outcome) == set(plain) | {f"decoupled/{at}/{name}" for at in range(3) for name in METRICS}
        torch.testing.assert_close({name: outcome[name] for name in plain}, plain, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(outcome, ranks, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("_install")
def test_a_run_trains_with_it(data_dir: Path, tmp_path: Path) -> None:
    words = "--model tiny --num-frames 2 --size-px 32 --batch 4 --microbatch 2 --steps 2 --workers 1 --device cpu"
    named = ["--loss.kind", "decoupled", "--shards", data_dir, "--out", tmp_path / "run"]
    assert train("dual-encoder", *words.split(), *named) == 0
    lines = steps(tmp_path / "run")
    assert lines[0]["loss"] > 0 and lines[0]["temperature"] == pytest.approx(0.07)
    assert lines[1]["temperature"] != lines[0]["temperature"]


def max_margin(pairs: Pairs, settings: Loss) -> torch.Tensor:
    limit_b1 = (pairs.video_bE * pairs.text_bE).sum(1, keepdim=True)
    limit_b1 = limit_b1 - settings.number("margin") * pairs.batch["relevancy"][:, None]
    both_2bB = torch.stack([pairs.video_bE @ pairs.text_BE.T, pairs.text_bE @ pairs.video_BE.T])
    over_2bB = (both_2bB - limit_b1).clamp(min=0).scatter(2, pairs.target_b[None, :, None].expand(2, -1, 1), 0)
    return over_2bB.sum() / (2 * len(limit_b1) * (len(pairs.video_BE) - 1))


class SigLIP(AutogradObjective):
    """A loss with a second parameter beside the temperature."""

    def __init__(self, settings: Loss, **context: Any) -> None:
        super().__init__(settings, **context)
        self.logit_bias = torch.nn.Parameter(torch.tensor(-10.0))

    def value(self, pairs: Pairs) -> torch.Tensor:
        logits_bB = pairs.scale * pairs.video_bE @ pairs.text_BE.T + self.logit_bias
        sign_bB = torch.full_like(logits_bB, -1).scatter(1, pairs.target_b[:, None], 1)
        return -functional.logsigmoid(sign_bB * logits_bB).sum() / len(logits_bB)


@pytest.mark.parametrize(("kind", "loss"), [("infonce", info_nce), ("siglip", SigLIP), ("max-margin", max_margin)])
def test_autograd_finds_the_gradients_of_the_closed_forms(
    kind: str, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Loss(kind=kind, use_relevancy=True) if kind == "max-margin" else settings_of(kind)
    outcomes = []
    for row in (LOSSES[kind], LossSpec(name=kind, loss=loss, settings=LOSSES[kind].settings)):
        monkeypatch.setitem(LOSSES._builtin, kind, row)
        model, objective = Table(6), objective_of(settings, table=True)
        metrics = objective.backward(model, batch_of(0), Step(number=1))
        gradients = {
            name: parameter.grad for name, parameter in [*model.named_parameters(), *objective.named_parameters()]
        }
        outcomes.append((gradients, metrics["loss"], metrics["batch_accuracy"]))
    assert isinstance(objective, AutogradObjective)
    torch.testing.assert_close(outcomes[1], outcomes[0])


@pytest.mark.parametrize(
    ("returned", "words"),
    [(None, "NoneType"), (torch.zeros(2), r"torch\.float32 \[2\]"), (torch.zeros(()), r"torch\.float32 \[\]")],
)
def test_a_function_that_returns_no_loss_is_named(returned: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = LossSpec(name="infonce", loss=lambda pairs, settings: returned, settings=LOSSES["infonce"].settings)
    monkeypatch.setitem(LOSSES._builtin, "infonce", row)
    objective = objective_of(settings_of("infonce"), table=True)
    with pytest.raises(TypeError, match=f"the loss infonce returned {words}, not a scalar tensor with a gradient"):
        objective.backward(Table(6), batch_of(0), Step(number=1))


@pytest.mark.usefixtures("_install")
def test_a_setting_that_its_row_does_not_name_is_refused() -> None:
    with pytest.raises(UserError, match="decoupled does not use it"):
        Loss(kind="decoupled", margin=0.1)


def test_the_documentation_shows_its_file() -> None:
    assert decoupled.__file__ is not None
    docs = Path(__file__).parents[3] / "docs/losses.md"
    assert f"```python\n{Path(decoupled.__file__).read_text()}```" in docs.read_text()
