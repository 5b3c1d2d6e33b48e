"""The choices of `train quickstart`, as a function of synthetic data and machines."""

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.quickstart import choice
from clipmill.train.quickstart.choice import SplitFacts, Survey, split_to_evaluate, split_to_train


def folder(
    address: str = "data",
    *,
    captions: int = 10,
    splits: tuple[str, ...] = ("train", "val"),
    labels: tuple[str, ...] = (),
) -> Survey:
    facts = SplitFacts(num_videos=2, num_chunks=4, hours=0.1, num_captions=captions)
    return Survey(
        address=address, columns={"video": "v"}, splits=dict.fromkeys(splits, facts), chunk_s=15.0, labels=labels
    )


def test_captions_decide_the_task_unless_a_flag_does() -> None:
    assert choice.choose_task([folder()], split="train", requested=None).value == "dual-encoder"
    assert choice.choose_task([folder(captions=0)], split="train", requested=None).value == "mae"
    mixed = choice.choose_task([folder(), folder("films", captions=0)], split="train", requested=None)
    assert mixed.value == "mae" and "films" in mixed.reason
    assert choice.choose_task([folder()], split="train", requested="mae").value == "mae"
    with pytest.raises(UserError, match="has no captions, but train dual-encoder needs them") as refused:
        choice.choose_task([folder(captions=0)], split="train", requested="dual-encoder")
    assert "prep manifest folder VIDEOS --captions captions.csv" in str(refused.value.hint)


def test_a_label_is_chosen_where_there_is_one() -> None:
    assert choice.choose_label([folder(labels=("shape",))], requested=None) == "shape"
    kitchen = folder(labels=("verb", "noun", "action"))
    assert choice.choose_label([kitchen], requested="action") == "action"
    with pytest.raises(UserError, match="several labels: verb, noun, action") as refused:
        choice.choose_label([kitchen], requested=None)
    assert refused.value.hint == "use --label action"
    with pytest.raises(UserError, match="no labels"):
        choice.choose_label([kitchen, folder()], requested=None)


@pytest.mark.parametrize(
    ("task", "gpus", "preset"),
    [
        ("dual-encoder", [], "tiny"),
        ("dual-encoder", [24e9, 24e9], "b16-ego4d"),
        ("dual-encoder", [24e9, 4e9], "tiny"),
        ("mae", [80e9], "mae-b16-k400"),
        ("caption", [80e9], "tiny"),
    ],
)
def test_gpus_decide_the_preset(task: str, gpus: list[int], preset: str) -> None:
    assert choice.choose_preset(task, gpu_bytes=gpus).value == preset


def test_the_splits_are_found_whatever_their_names_are() -> None:
    assert split_to_train([folder()]) == "train" and split_to_evaluate([folder()], training_split="train") == "val"
    both = [folder(splits=("test", "train", "val")), folder("films", splits=("train", "test"))]
    assert split_to_evaluate(both, training_split="train") == "test"
    alone = [folder(splits=("all",))]
    assert split_to_train(alone) == "all" and split_to_evaluate(alone, training_split="all") is None
    with pytest.raises(UserError, match="data has first, second; films has third"):
        split_to_train([folder(splits=("first", "second")), folder("films", splits=("third",))])


def test_the_batch_is_a_power_of_two_that_the_data_can_fill() -> None:
    assert choice.first_batch(64, num_samples=10_000, on_gpu=False) == 64
    assert choice.first_batch(64, num_samples=9, on_gpu=False) == 4
    assert choice.first_batch(64, num_samples=1, on_gpu=False) == 2
    assert choice.first_batch(2048, num_samples=10**6, on_gpu=True) == 256


def test_the_length_is_that_of_the_epochs_within_the_time() -> None:
    whole = choice.choose_length(6400, batch=64, step_s=0.1, other_s=5.0, minutes=10.0)
    assert (whole.steps, whole.epochs, whole.reason) == (3000, 30.0, "30 epochs")
    short = choice.choose_length(64, batch=64, step_s=0.1, other_s=5.0, minutes=10.0)
    assert (short.steps, short.reason) == (200, "the fewest steps that show learning")
    cut = choice.choose_length(10**6, batch=64, step_s=1.0, other_s=60.0, minutes=10.0)
    assert (cut.steps, cut.reason) == (540, "the most that --minutes 10 allows") and cut.epochs < 1
    least = choice.choose_length(9, batch=4, step_s=9.0, other_s=60.0, minutes=0.1)
    assert (least.steps, least.reason) == (20, "the minimum, although --minutes 0.1 allows fewer")


def test_the_expected_time_has_a_range_that_grows_with_what_is_not_known() -> None:
    def expect_time(
        times: list[float], *, num: int = 1, busy: bool = False, checkpoints_s: float = 0.0
    ) -> choice.ExpectedTime:
        return choice.expected_time(
            101, step_times=times, start_s=10.0, checkpoints_s=checkpoints_s, num_processes=num, busy=busy
        )

    def values(its: choice.ExpectedTime) -> tuple[float, float, float]:
        return its.seconds, its.least_s, its.most_s

    assert values(expect_time([1.0] * 8)) == pytest.approx((110.0, 93.5, 126.5))
    assert values(expect_time([1.0] * 8, checkpoints_s=20.0)) == pytest.approx((130.0, 110.5, 149.5))
    assert values(expect_time([0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 1.5, 1.5])) == pytest.approx((110.0, 58.5, 161.5))
    assert values(expect_time([1.0] * 8, busy=True)) == pytest.approx((110.0, 55.0, 220.0)), (
        "from half to twice the time"
    )
    assert expect_time([1.0] * 8, num=8).most_s > expect_time([1.0] * 8).most_s
    assert choice.is_busy(5.0, cores=2) and not choice.is_busy(1.2, cores=2)
