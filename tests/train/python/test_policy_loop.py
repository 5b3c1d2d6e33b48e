"""The policy's training loop of docs/tutorials/robot.md: its batches equal the items of a `LeRobotDataset`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from clipmill.prep.synthetic import read_frame_number
from tests.conftest import ROOT
from tests.lerobot_folder import CAMERAS, EPISODES, frame_number, write_lerobot
from tests.manifests.test_lerobot_reader import PYTHON, ask
from tests.tutorials.page import read_page
from tests.tutorials.running import Runner

OFFSETS = (-1, 0)  # in frames of 0.1 s
NUM_ACTIONS = 4
# Limit of 255 levels: two conversions to RGB differ by up to 6, the colours of different frames by 37 or more.
MOST_LEVELS = 8


@contextmanager
def recorded_batches() -> Iterator[list[dict[str, Any]]]:
    """Yield a list that collects the batches passed to models."""
    batches: list[dict[str, Any]] = []

    def record(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        batches.extend(argument for argument in arguments if isinstance(argument, dict))

    handle = register_module_forward_pre_hook(record)
    try:
        yield batches
    finally:
        handle.remove()


def run_loop(folder: Path, monkeypatch: pytest.MonkeyPatch, *, size_px: tuple[int, int]) -> dict[int, dict[str, Any]]:
    """Run the commands that read the dataset, and the loop.

    Returns:
        Inputs of the policy by `index`.
    """
    monkeypatch.chdir(folder)
    runner = Runner(folder, monkeypatch.setenv)
    blocks = read_page(ROOT / "docs/tutorials/robot.md").blocks
    (loop,) = (block for block in blocks if block.language == "python")
    runner.run(blocks[0])
    assert "size_px=(48, 64)" in loop.text
    with recorded_batches() as batches:
        runner.run(replace(loop, text=loop.text.replace("size_px=(48, 64)", f"size_px={size_px}")))
    return {
        index: {name: values[row].numpy() for name, values in batch.items()}
        for batch in batches
        for row, index in enumerate(batch["index"].tolist())
    }


def test_the_policy_sees_the_frames_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lerobot(tmp_path / "robot")
    items = run_loop(tmp_path, monkeypatch, size_px=(48, 64))
    steps = [(episode, frame) for episode, each in enumerate(EPISODES) for frame in range(len(each.tasks))]
    assert len(items) == len(steps) - len(steps) % 8  # samples that do not fill a batch start the next epoch
    for index, item in items.items():
        episode, frame = steps[index]
        assert item["observation.state"].tolist() == [episode, frame]
        ahead = np.arange(frame, frame + NUM_ACTIONS)
        assert np.array_equal(item["action_is_pad"], ahead >= len(EPISODES[episode].tasks))
        for camera, name in enumerate(CAMERAS):
            numbers = [read_frame_number(picture.transpose(1, 2, 0) * 255) for picture in item[name]]
            assert numbers == [frame_number(camera, episode, max(0, frame + offset)) for offset in OFFSETS]
            assert item[f"{name}_is_pad"].tolist() == [frame + offset < 0 for offset in OFFSETS]


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON.exists(), reason="LeRobot is not installed: make lerobot")
def test_batches_are_the_items_of_a_lerobot_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(tmp_path, "write", tmp_path / "robot")
    ask(tmp_path, "items", tmp_path / "robot", tmp_path / "items.npz")
    theirs = np.load(tmp_path / "items.npz")
    items = run_loop(tmp_path, monkeypatch, size_px=(96, 128))
    assert len(items) == len(theirs["action"]) - len(theirs["action"]) % 8
    for index, item in items.items():
        assert item.keys() - {"index"} == set(theirs.files)
        for name in theirs.files:
            if name in CAMERAS:
                # Pixels in the middle of the blocks are compared, as in `test_read_clips.py`: swscale does not
                # interpolate chroma.
                shown, expected = (255 * frames[..., 8::16, 8::16] for frames in (item[name], theirs[name][index]))
                assert np.abs(shown - expected).max() < MOST_LEVELS, (index, name)
            else:
                assert np.array_equal(item[name], theirs[name][index]), (index, name)
