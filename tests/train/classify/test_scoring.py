from typing import Any

import numpy as np
import pytest
import torch

from clipmill.train.data.classes import ClassList
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.probe_classifiers import class_ranks
from clipmill.train.evaluation.tables import Predictions, class_view, majority_baseline
from clipmill.train.tasks.classify.evaluation import ClassTallies, Tally, hits, marginal_probabilities, view_mean

CPU = torch.device("cpu")


def random_probabilities(num: int, num_classes: int, seed: int = 0) -> torch.Tensor:
    logits = np.random.default_rng(seed).standard_normal((num, num_classes)) * 2
    return torch.from_numpy(logits).softmax(dim=1)


def test_views_are_averaged_as_probabilities() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 6, 4)))
    means = view_mean(logits)
    for row in range(3):
        view_probabilities = [np.exp(view) / np.exp(view).sum() for view in logits[row].numpy()]
        assert np.allclose(means[row], np.mean(view_probabilities, axis=0), atol=1e-6)
    assert not np.allclose(means, logits.mean(dim=1).softmax(dim=1))


def test_marginals_are_sums_of_probabilities_and_0_for_a_class_without_actions() -> None:
    probabilities = random_probabilities(5, 7)
    verbs = torch.tensor([0, 3, 3, 1, 0, 6, 3])
    marginals = marginal_probabilities(probabilities, verbs)
    assert marginals.shape == (5, 7)
    for row in range(5):
        for verb in range(7):
            action_probabilities = [float(probabilities[row, action]) for action in range(7) if verbs[action] == verb]
            assert marginals[row, verb].item() == pytest.approx(sum(action_probabilities), abs=1e-12)
    assert (marginals[:, [2, 4, 5]] == 0).all()


def test_a_verb_wins_by_the_sum_of_its_actions_not_by_the_best_of_them() -> None:
    classes = ClassList("action", ("0:0", "0:1", "1:0"))
    scores = ClassTallies(classes, CPU)
    scores.add(torch.tensor([[0.3, 0.3, 0.4]]), torch.tensor([0]))
    numbers = scores.metrics(World())
    assert (numbers["action_top1"], numbers["verb_top1"], numbers["noun_top1"]) == (0, 1, 1)
    assert numbers["action_top5"] == 1


def test_hits_are_those_of_a_full_sort() -> None:
    probabilities = random_probabilities(200, 12, seed=1)
    probabilities[::3, 4] = probabilities[::3, 2]  # in a tie, the lower class comes first
    labels = torch.from_numpy(np.random.default_rng(2).integers(0, 12, 200))
    order = np.argsort(-probabilities.numpy(), axis=1, kind="stable")
    rank = (order == labels.numpy()[:, None]).argmax(axis=1)
    assert hits(probabilities, labels).numpy().tolist() == [[bool(place < 1), bool(place < 5)] for place in rank]


def test_the_mean_over_classes_counts_those_that_occur_alike() -> None:
    tally = Tally.zeros(4, CPU)
    probabilities = torch.tensor([[0.9, 0.1, 0, 0]] * 3 + [[0.1, 0.9, 0, 0]])
    tally.add(probabilities[:2], torch.tensor([0, 0]))
    tally.add(probabilities[2:], torch.tensor([1, 2]))
    numbers = tally.metrics()
    assert numbers["top1"] == 2 / 4 and numbers["top5"] == 1
    assert numbers["mean_class"] == pytest.approx((1 + 0 + 0) / 3)


def test_results_by_class_say_which_class_is_taken_for_which() -> None:
    classes = ClassTallies(ClassList("action", ("0:0", "0:1", "1:0")), CPU)
    rows = [[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.1, 0.6, 0.3], [0.2, 0.5, 0.3]]
    classes.add(torch.tensor(rows[:3]), torch.tensor([0, 0, 2]))
    classes.add(torch.tensor(rows[3:]), torch.tensor([2]))
    verb, noun, action = classes.by_class()
    assert [table["title"] for table in (verb, noun, action)] == ["verb", "noun", "action"]
    assert action["names"] == ["0:0", "0:1", "1:0"] and action["num"] == [2, 0, 2] and action["num_first"] == [1, 0, 0]
    assert action["confused"] == [[2, 1, 2], [0, 1, 1]]
    assert (verb["num"], verb["num_first"], verb["confused"]) == ([2, 2], [2, 0], [[1, 0, 2]])
    assert noun["names"] == ["0", "1"] and noun["num"] == [4, 0]
    assert majority_baseline(action) == {"top1": 0.5, "top5": 1.0, "mean_class": 0.5}
    view = class_view(action)
    assert [row["name"] for row in view["rows"]] == ["0:0", "1:0"], "only classes with clips are listed"
    assert [[cell["count"] for cell in row["cells"]] for row in view["matrix"]] == [[1, 0], [0, 0]]
    assert [row["others"] for row in view["matrix"]] == [1, 2] and view["has_others"]
    assert view["pairs"][0] == {"name": "1:0", "taken_for": "0:1", "count": 2, "share": 1.0}


def test_a_tie_is_not_a_hit_and_is_taken_for_the_other_class() -> None:
    scores, label = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([0, 1])
    predictions = Predictions.of(scores, label, rank_N=class_ranks(scores, label))
    assert predictions.predicted_N.tolist() == [1, 0]


def each_taken_for_the_next(num_classes: int) -> dict[str, Any]:
    """Return results in which every clip is taken for the next class; class n has n + 1 clips."""
    label = torch.arange(num_classes).repeat_interleave(torch.arange(1, num_classes + 1))
    predictions = Predictions(label, (label + 1) % num_classes, torch.ones_like(label, dtype=torch.bool))
    return predictions.by_class([f"c{number}" for number in range(num_classes)], title="class")


def test_the_first_five_are_shown_of_more_than_five_classes() -> None:
    assert [class_view(each_taken_for_the_next(number))["has_among"] for number in (5, 6)] == [False, True]


def test_of_many_classes_the_matrix_has_the_most_frequent() -> None:
    view = class_view(each_taken_for_the_next(40))
    assert [row["name"] for row in view["matrix"]] == [f"c{number}" for number in range(39, 27, -1)]
    assert view["matrix"][0]["others"] == 40 and view["matrix"][1]["cells"][0]["count"] == 39
    assert len(view["rows"]) == 40 and view["pairs"][0]["count"] == 40


def test_ranks_counts_add_up() -> None:
    probabilities, labels = random_probabilities(20, 6, seed=3), torch.arange(20) % 6
    whole = ClassTallies(ClassList("class", tuple("abcdef")), CPU)
    whole.add(probabilities, labels)
    parts = [ClassTallies(ClassList("class", tuple("abcdef")), CPU) for _ in range(2)]
    for rank, part in enumerate(parts):
        part.add(probabilities[rank::2], labels[rank::2])
    whole_tallies = whole.tallies["class"]
    for name in ("num_right", "num_samples"):
        assert torch.equal(getattr(whole_tallies, name), sum(getattr(part.tallies["class"], name) for part in parts))
