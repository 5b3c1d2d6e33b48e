"""Videos and annotation files for the tutorials: short synthetic videos with the file names of each dataset."""

import csv
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clipmill.prep.synthetic import Mode, SyntheticVideo

NUM_VIDEOS, VIDEO_S = 10, 6.0


@dataclass(frozen=True)
class Scene:
    """Caption of a synthetic video."""

    begin_s: float
    end_s: float
    text: str


@dataclass(frozen=True)
class Video:
    """Synthetic video; every fifth one is held out."""

    path: Path
    is_held_out: bool
    scenes: tuple[Scene, ...]


def make_videos(folder: Path) -> list[Video]:
    """Encode the videos that all tutorials share."""
    folder.mkdir(parents=True)
    made = []
    for number in range(NUM_VIDEOS):
        video = SyntheticVideo(Mode.SHAPES, number, seed=0, duration_s=VIDEO_S)
        path = folder / f"{number:02d}.mp4"
        video.write(path)
        scenes = tuple(Scene(begin_s, end_s, text) for begin_s, end_s, text, _ in video.captions())
        made.append(Video(path, video.split == "val", scenes))
    return made


def own_videos(folder: Path, videos: list[Video]) -> None:
    """Write `videos/` with subfolders, and `captions.csv` with one caption per video."""
    rows = []
    for number, video in enumerate(videos):
        name = f"{'garden' if number % 2 else 'kitchen'}/{number:02d}.mp4"
        _link(video.path, folder / "videos" / name)
        split = "val" if video.is_held_out else "train"
        rows += [(name, scene.begin_s, scene.end_s, scene.text, split) for scene in video.scenes]
    with (folder / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("video", "begin_s", "end_s", "text", "split"), *rows])


def own_videos_and_models(folder: Path, videos: list[Video]) -> None:
    """Write the files of `own_videos`, and `models/` with a small random Wan VAE and a small random umT5."""
    from tests.prep.latents.video_vaes import save_model
    from tests.prep.text.t5_models import saved_t5

    own_videos(folder, videos)
    save_model("AutoencoderKLWan", folder / "models" / "wan")
    saved_t5(folder / "models" / "umt5")
    for path in (folder / "models").rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors does not follow the umask


def uncaptioned(folder: Path, videos: list[Video]) -> None:
    """Write `videos/` without captions; the videos in its folder `val` are held out."""
    for video in videos:
        _link(video.path, folder / "videos" / ("val" if video.is_held_out else "") / video.path.name)


def robot(folder: Path, _: list[Video]) -> None:
    """Write `robot/`, a LeRobot dataset of four episodes and two cameras."""
    from tests.lerobot_folder import write_lerobot

    write_lerobot(folder / "robot")


def actions(folder: Path, videos: list[Video]) -> None:
    """Write `videos/` as `own_videos` does, and `actions.csv`, whose class is the visible shape."""
    own_videos(folder, videos)
    with (folder / "captions.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    labelled = [(video, begin, end, text.split()[2], split) for video, begin, end, text, split in rows]
    with (folder / "actions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "start", "end", "label", "split"), *labelled])


def vatex(folder: Path, videos: list[Video]) -> None:
    """Write `videos/` and the two annotation files of VATEX, with two of the ten captions."""
    entries: dict[str, list[object]] = {"training": [], "validation": []}
    for number, video in enumerate(videos):
        name = f"Ptf_2VRj-V{number}_000122_000132"
        _link(video.path, folder / "videos" / f"{name}.mp4")
        text = video.scenes[0].text
        entry = {"videoID": name, "enCap": [f"{text}.", f"In this video, {text}."], "chCap": []}
        entries["validation" if video.is_held_out else "training"].append(entry)
    for split, its in entries.items():
        (folder / f"vatex_{split}_v1.0.json").write_text(json.dumps(its))


def ek100(folder: Path, videos: list[Video]) -> None:
    """Write `videos/` and the two retrieval lists of EPIC-KITCHENS-100."""
    header = "narration_id participant_id video_id narration_timestamp start_timestamp stop_timestamp start_frame"
    header += " stop_frame narration verb verb_class noun noun_class all_nouns all_noun_classes"
    rows: dict[str, list[list[object]]] = {"train": [], "test": []}
    for number, video in enumerate(videos):
        name = f"P{number:02d}_101"
        _link(video.path, folder / "videos" / f"P{number:02d}" / f"{name}.MP4")
        for index, scene in enumerate(video.scenes):
            verb, noun = number % 3, number % 4
            begin, end = (f"00:00:{seconds:05.2f}" for seconds in (scene.begin_s, scene.end_s))
            row: list[object] = [
                f"{name}_{index}",
                name[:3],
                name,
                begin,
                begin,
                end,
                0,
                1,
                scene.text,
                "move",
                verb,
                "shape",
                noun,
            ]
            rows["test" if video.is_held_out else "train"].append([*row, "['shape']", f"[{noun}]"])
    for split, its in rows.items():
        with (folder / f"EPIC_100_retrieval_{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([header.split(), *its])


DATA: dict[str, Callable[[Path, list[Video]], None]] = {
    "own_videos": own_videos,
    "own_videos_and_models": own_videos_and_models,
    "uncaptioned": uncaptioned,
    "robot": robot,
    "actions": actions,
    "vatex": vatex,
    "ek100": ek100,
}


def _link(path: Path, new: Path) -> None:
    new.parent.mkdir(parents=True, exist_ok=True)
    os.link(path, new)
