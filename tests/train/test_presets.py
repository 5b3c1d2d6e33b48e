"""Every published preset trains two steps at tiny size, on files in the published form of its dataset."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from open_clip import factory

from clipmill.manifests.errors import run_command
from clipmill.manifests.store import read_captions, read_videos
from clipmill.prep.commands.manifest import app
from clipmill.train.config.files import PRESETS_FOLDER
from clipmill.train.run.folder import RunFolder, read_lines
from tests.tiers import nightly_beyond
from tests.train.latents.written import Chunk, Written, write_latents
from tests.train.library.small_library import RESNET, add_open_clip
from tests.train.running import train
from tests.train.tiny_data import chunks_of, write_captions, write_shard

NUM_FRAMES = 40  # two chunks of 2 s
TINY = ("--model", "tiny", "--batch", 4, "--steps", 2, "--warmup-steps", 0, "--workers", 1, "--device", "cpu")
SMALL = ("--num-frames", 2, "--size-px", 32)
EVERY = ("--evaluate.every", 2)
SMALL_TOWERS = ("--towers.image", f"open_clip:{RESNET}", "--towers.text", f"open_clip:{RESNET}")
DECODER = ("--decoder.name", "tiny", "--decoder.depth", 1, "--decoder.vocabulary", 280, "--decoder.max-tokens", 12)

EPIC_HEADER = (
    "narration_id,participant_id,video_id,narration_timestamp,start_timestamp,stop_timestamp,start_frame,stop_frame,"
    "narration,verb,verb_class,noun,noun_class,all_nouns,all_noun_classes"
)
EPIC_ROWS = (
    "{id}_0,P01,{id},00:00:01.089,00:00:00.14,00:00:01.37,8,82,open door,open,3,door,3,['door'],[3]\n"
    "{id}_1,P01,{id},00:00:01.629,00:00:01.00,00:00:02.06,60,123,take plate,take,0,plate,2,['plate'],[2]\n"
    "{id}_2,P01,{id},00:00:02.349,00:00:01.98,00:00:03.49,118,209,put plate into rack.,put-into,5,plate,2,"
    "\"['plate', 'rack']\",\"[2, 110]\"\n"
)
# Command, dataset, and flags that make each preset small. EVERY_DAY has one preset for each task and kind of data;
# test_preset_numbers.py compares the numbers of all presets.
EVERY_DAY = ("b16-ek100-mir", "b16-ek100-cls", "mae-latents", "vatex-timesformer-gpt2")
PRESETS: dict[str, tuple[str, str, tuple[object, ...]]] = {
    "b16-ego4d": ("dual-encoder", "ego4d", SMALL),
    "b16-ego4d-llm": ("dual-encoder", "ego4d", SMALL),
    "l14-ego4d": ("dual-encoder", "ego4d", SMALL),
    "l14-ego4d-llm": ("dual-encoder", "ego4d", SMALL),
    "b16-ek100-mir": ("dual-encoder", "ek100-mir", (*SMALL, *EVERY)),
    "l14-ek100-mir": ("dual-encoder", "ek100-mir", (*SMALL, *EVERY)),
    "b16-ek100-cls": ("classify", "ek100-cls", (*SMALL, *EVERY)),
    "l14-ek100-cls": ("classify", "ek100-cls", (*SMALL, *EVERY)),
    "fastclip-medium": ("dual-encoder", "vatex", SMALL),
    "fastclip-medium-images": ("dual-encoder", "vatex", ("--size-px", 32, *SMALL_TOWERS)),
    "fastclip-large": ("dual-encoder", "vatex", SMALL),
    "fastclip-xlarge": ("dual-encoder", "vatex", SMALL),
    "k400-videomae": ("classify", "k400", (*SMALL, *EVERY)),
    "mae-b16-k400": ("mae", "k400", SMALL),
    "mae-latents": ("mae", "latents", ("--num-frames", 2)),
    "vatex-timesformer-gpt2": ("caption", "vatex", (*SMALL, *EVERY, *DECODER, "--decoding.max-tokens", 4)),
}
Make = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def _small_towers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register the tiny models in open_clip while the tests of this file run."""
    before = list(factory._MODEL_CONFIG_PATHS), dict(factory._MODEL_CONFIGS)
    add_open_clip(tmp_path_factory.mktemp("models"))
    yield
    factory._MODEL_CONFIG_PATHS[:], factory._MODEL_CONFIGS = before


@pytest.fixture(scope="module")
def data_of(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Function that returns the data folder of a dataset, made at the first call."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = MAKERS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return make


def manifest(folder: Path, kind: str, *annotations: Path, videos: list[str]) -> Path:
    """Run `prep manifest` on annotation files, and write chunks of the videos that it lists."""
    files, data_dir = folder / "videos", folder / "data"
    files.mkdir()
    for name in videos:
        (files / name).write_bytes(b"video")
    places = [annotations[0], "--videos", files] if kind == "kinetics" else [files, "--annotations", *annotations]
    with pytest.raises(SystemExit) as left:
        words = [kind, *map(str, places), "--data", str(data_dir)]
        run_command(lambda: app(words, result_action="return_value"))
    assert left.value.code == 0
    splits = read_videos(data_dir).select(["video_id", "split"]).to_pylist()
    for shard_id, split in enumerate(sorted({row["split"] for row in splits})):
        names = [row["video_id"] for row in splits if row["split"] == split]
        write_shard(data_dir, shard_id, [chunk for name in names for chunk in chunks_of(name, NUM_FRAMES)], split=split)
    return data_dir


def epic(folder: Path, header: str, **ids: list[str]) -> Path:
    """Write annotation files of EPIC-KITCHENS-100 with three rows per video.

    In some releases, the first column is `uid`.
    """
    paths = []
    for name, narrations in ids.items():
        lines = [line for narration in narrations for line in EPIC_ROWS.format(id=narration).splitlines()]
        if header.startswith("uid,"):
            lines = [f"{number},{line}" for number, line in enumerate(lines)]
        path = folder / f"EPIC_100_{name}.csv"
        path.write_text("\n".join([header, *lines]) + "\n")
        paths.append(path)
    return manifest(
        folder,
        "epic-kitchens",
        *paths,
        videos=[f"{narration}.MP4" for narrations in ids.values() for narration in narrations],
    )


def ego4d(folder: Path) -> Path:
    path = folder / "narration.json"
    points = [{"timestamp_sec": time_s, "narration_text": f"#C C opens door {time_s}"} for time_s in (0.5, 1.5, 2.5)]
    narrated = {uid: {"narration_pass_1": {"narrations": points}} for uid in ("uid-a", "uid-b")}
    path.write_text(json.dumps({"videos": narrated}))
    return manifest(folder, "ego4d", path, videos=["uid-a.mp4", "uid-b.mp4"])


def vatex(folder: Path) -> Path:
    paths, videos = [], []
    for name, ids in (("training", "abcd"), ("validation", "ef")):
        rows = [
            {"videoID": f"{letter * 11}_000000_000010", "enCap": [f"{letter} runs", f"{letter} sits"]} for letter in ids
        ]
        paths.append(folder / f"vatex_{name}_v1.0.json")
        paths[-1].write_text(json.dumps(rows))
        videos += [f"{row['videoID']}.mp4" for row in rows]
    return manifest(folder, "vatex", *paths, videos=videos)


def k400(folder: Path) -> Path:
    path = folder / "kinetics_400.csv"
    rows = [(letter * 11, "train" if letter in "abcd" else "validate") for letter in "abcdef"]
    lines = [f"{('zumba', 'riding a bike')[at % 2]},{name},0,4,{split}" for at, (name, split) in enumerate(rows)]
    path.write_text("\n".join(["label,youtube_id,time_start,time_end,split", *lines]) + "\n")
    return manifest(folder, "kinetics", path, videos=[f"{name}_000000_000004.mp4" for name, _ in rows])


def latents(folder: Path) -> Path:
    written = Written(folder / "data")
    videos = {f"video{number}": "train" for number in range(4)}
    write_captions(written.data_dir, videos, [])
    chunks = [[Chunk(name, 0, 24, frame=(4, 8, 8))] for name in videos]
    noise = np.random.default_rng(0)
    write_latents(
        written, chunks, values=lambda chunk: noise.normal(size=(chunk.num_frames, *chunk.frame)).astype("f2")
    )
    return written.data_dir


MAKERS: dict[str, Callable[[Path], Path]] = {
    "ego4d": ego4d,
    "vatex": vatex,
    "k400": k400,
    "latents": latents,
    "ek100-cls": lambda folder: epic(folder, EPIC_HEADER, train=["P01_01", "P01_02"], validation=["P01_11"]),
    "ek100-mir": lambda folder: epic(
        folder, f"uid,{EPIC_HEADER}", retrieval_train=["P01_01", "P01_02"], retrieval_test=["P01_11"]
    ),
}


def test_every_published_preset_is_tried() -> None:
    assert set(PRESETS) == {path.stem for path in PRESETS_FOLDER.glob("*.yaml") if not path.stem.startswith("tiny")}


@pytest.mark.parametrize("preset", nightly_beyond(EVERY_DAY, PRESETS))
def test_a_published_preset_trains_on_the_files_of_its_data_set(data_of: Make, tmp_path: Path, preset: str) -> None:
    command, data_set, flags = PRESETS[preset]
    data_dir, out = data_of(data_set), tmp_path / "run"
    assert train(command, "--shards", data_dir, "--preset", preset, "--out", out, *TINY, *flags) == 0
    lines = read_lines(RunFolder(out).metrics)
    assert len(lines) == 2 and all(np.isfinite(line["loss"]) for line in lines)
    split = "test" if preset.endswith("-ek100-mir") else "val"
    evaluated = [name for name in lines[-1] if name.startswith(f"{split}/")]
    assert bool(evaluated) == (EVERY[0] in flags)


@pytest.mark.nightly
def test_the_official_files_of_multi_instance_retrieval_are_scored(
    data_of: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir, out = data_of("ek100-mir"), tmp_path / "run"
    assert set(read_videos(data_dir)["split"].to_pylist()) == {"train", "test"}
    assert read_captions(data_dir).num_rows == 9
    flags = ("--preset", "b16-ek100-mir", "--out", out, *TINY, *SMALL, *EVERY)
    assert train("dual-encoder", "--shards", data_dir, *flags) == 0
    assert "test/average_mean_ap" in read_lines(RunFolder(out).metrics)[-1]
    sentences = tmp_path / "EPIC_100_retrieval_test_sentence.csv"
    texts = ("open door", "take plate", "put plate into rack.")
    sentences.write_text(
        "narration_id,narration\n" + "".join(f"P01_11_{at},{sentence}\n" for at, sentence in enumerate(texts))
    )
    capsys.readouterr()
    assert train("eval", "mir", out, "--sentences", sentences, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["coverage"] == "3 of 3 clips, 3 sentences" and 0 <= result["average"]["mean_ap"] <= 1
