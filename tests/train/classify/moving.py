"""A labelled data folder of bright or dark bars that move to the left or to the right."""

import io
from pathlib import Path

import av
import numpy as np
from av.video.stream import VideoStream

from tests.train.tiny_data import CHUNK_FRAMES, FPS, SIZE_PX, Caption, video_sample, write_captions, write_shard

CLIP_FRAMES = 10
CLASSES = ("dark:left", "dark:right", "bright:left", "bright:right")
VERBS = {"left": 0, "right": 1}
NOUNS = {"dark": 0, "bright": 10}


def encode_clips(names: list[str], rng: np.random.Generator) -> bytes:
    """Encode clips as a chunk, one clip after another."""
    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        options = {"threads": "1", "g": "8", "bf": "2", "preset": "ultrafast", "crf": "20", "sc_threshold": "0"}
        options["x264-params"] = "bframes=2:open-gop=0"
        stream = container.add_stream("libx264", rate=FPS, options=options)
        assert isinstance(stream, VideoStream)
        stream.width = stream.height = SIZE_PX
        stream.pix_fmt = "yuv420p"
        for name in names:
            brightness, direction = name.split(":")
            for number in range(CLIP_FRAMES):
                grey = rng.integers(90, 130, (SIZE_PX, SIZE_PX), dtype=np.uint8)
                step = number if direction == "right" else CLIP_FRAMES - 1 - number
                left = 4 + 5 * step
                grey[:, left : left + 10] = 235 if brightness == "bright" else 16
                container.mux(stream.encode(av.VideoFrame.from_ndarray(np.stack([grey] * 3, -1), format="rgb24")))
        container.mux(stream.encode(None))
    return content.getvalue()


def write_moving(data_dir: Path, *, num_videos: int = 12) -> None:
    """Write videos with four clips of one second each; three of four videos are for training."""
    rng = np.random.default_rng(0)
    videos, captions = {}, []
    samples: dict[str, list] = {"train": [], "val": []}
    for number in range(num_videos):
        video_id, split = f"v{number:02d}", "val" if number % 4 == 3 else "train"
        videos[video_id] = split
        names = [CLASSES[place] for place in rng.permutation(4)]
        for chunk in range(2):
            payload = encode_clips(names[2 * chunk : 2 * chunk + 2], rng)
            samples[split].append(video_sample(video_id, chunk * CHUNK_FRAMES * 1000 // FPS, payload))
        for place, name in enumerate(names):
            brightness, direction = name.split(":")
            labels = {"label_verb": VERBS[direction], "label_noun": NOUNS[brightness], "label_class": name}
            captions.append(Caption(video_id, place, place + 1, f"{name} {number}", labels=labels))
    captions.append(Caption("v00", 0.0, 4.0, "all of it, of no class"))
    for shard_id, (split, its) in enumerate(samples.items()):
        write_shard(data_dir, shard_id, its, split=split)
    write_captions(data_dir, videos, captions)
