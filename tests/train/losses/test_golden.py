"""Golden losses of three steps, recorded after a review; `python -m tests.train.losses.test_golden` writes them."""

import json
from pathlib import Path

import pytest

from clipmill.train.distributed.world import Step
from clipmill.train.losses.settings import Convention, Loss
from tests.train.losses.pairs import CASES, Table, batch_of, objective_of

GOLDEN = Path(__file__).with_name("golden.json")


def losses_of(kind: str, convention: Convention) -> list[float]:
    """Return the losses of three steps with the published numbers, for fixed embeddings."""
    objective = objective_of(Loss(kind=kind, convention=convention), table=True)
    steps = [Step(number=number + 1, epoch=float(number)) for number in range(3)]
    metrics = [objective.backward(Table(6, seed=at), batch_of(at), step) for at, step in enumerate(steps)]
    return [float(numbers["loss"]) for numbers in metrics]


@pytest.mark.parametrize(("kind", "convention"), CASES)
def test_losses_are_the_golden_ones(kind: str, convention: Convention) -> None:
    golden = json.loads(GOLDEN.read_bytes())
    assert losses_of(kind, convention) == pytest.approx(golden[f"{kind}/{convention}"], rel=1e-6)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({"/".join(case): losses_of(*case) for case in CASES}, indent=1) + "\n")
