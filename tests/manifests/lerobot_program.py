"""Part of `test_lerobot_reader.py` that needs LeRobot, in a separate environment (`make lerobot`).

write ROOT        write a dataset of two cameras in LeRobot's default encoding
convert ROOT      convert a dataset of version 2.1 to version 3.0, in place
frames ROOT OUT   write all frames and their episodes and tasks, as LeRobot reads them, to OUT (.npz)
items ROOT OUT    write the training items of a policy with two frames and four actions to OUT (.npz)
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

FPS, LENGTHS = 30, (21, 34, 27)
CAMERAS = ("observation.images.top", "observation.images.wrist")
TASKS = ("open the drawer", "close the drawer")


def write(root: Path) -> None:
    """Write a dataset whose last episode has two tasks."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    camera = {"dtype": "video", "shape": (96, 128, 3), "names": ["height", "width", "channels"]}
    state = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
    features = {**dict.fromkeys(CAMERAS, camera), "observation.state": state, "action": state}
    dataset = LeRobotDataset.create("me/drawers", fps=FPS, features=features, root=root, use_videos=True)
    rng = np.random.default_rng(0)
    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            # The blocks change in each frame, so that all frames differ.
            pictures = {name: rng.integers(0, 256, (6, 8, 3), np.uint8).repeat(16, 0).repeat(16, 1) for name in CAMERAS}
            position = np.array([episode, frame], np.float32)
            task = TASKS[episode % 2 or (episode == len(LENGTHS) - 1 and frame >= 10)]
            dataset.add_frame({**pictures, "observation.state": position, "action": position, "task": task})
        dataset.save_episode()
    dataset.finalize()


def convert(root: Path) -> None:
    """Convert a dataset with LeRobot's script."""
    from lerobot.datasets.v30.convert_dataset_v21_to_v30 import convert_dataset

    convert_dataset(root.name, root=root.parent, push_to_hub=False)


def store_frames(root: Path, out: Path) -> None:
    """Store the frames that LeRobotDataset returns."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset(f"me/{root.name}", root=root, video_backend="pyav")
    items = [dataset[index] for index in range(len(dataset))]
    frames = {
        name: np.stack([(item[name] * 255).round().byte().permute(1, 2, 0).numpy() for item in items])
        for name in dataset.meta.video_keys
    }
    frames["episode"] = np.array([int(item["episode_index"]) for item in items])
    frames["task"] = np.array([item["task"] for item in items])
    np.savez(out, allow_pickle=False, **frames)


def store_items(root: Path, out: Path) -> None:
    """Store the items of LeRobotDataset with the offsets of docs/tutorials/robot.md."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    offsets_s = {**{name: [-0.1, 0.0] for name in CAMERAS}, "action": [step / FPS for step in range(4)]}
    dataset = LeRobotDataset(f"me/{root.name}", root=root, delta_timestamps=offsets_s, video_backend="pyav")
    items = [dataset[index] for index in range(len(dataset))]
    names = [name for name in items[0] if name.startswith(("observation", "action"))]
    np.savez(out, allow_pickle=False, **{name: np.stack([item[name].numpy() for item in items]) for name in names})


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {
        "write": write,
        "convert": convert,
        "frames": store_frames,
        "items": store_items,
    }
    programs[sys.argv[1]](*map(Path, sys.argv[2:]))
