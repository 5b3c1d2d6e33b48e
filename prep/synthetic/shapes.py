"""Scenes with one moving shape, each with a sentence that describes it; training data of the demo."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np

WIDTH, HEIGHT = 320, 240
SHORTEST_SCENE_S, LONGEST_SCENE_S = 3.0, 6.0
SHAPES = ("circle", "square", "triangle", "cross")
# BT.601 limited range: Y, Cb, Cr.
COLOURS = {
    "red": (81, 90, 240),
    "green": (145, 54, 34),
    "blue": (41, 240, 110),
    "yellow": (210, 16, 146),
    "white": (235, 128, 128),
    "purple": (106, 202, 222),
}
# Start and end position of the centre as fractions of width and height, and radius as a fraction of the height.
MOTIONS = {
    "moves to the left": ((0.85, 0.5), (0.15, 0.5), (0.17, 0.17)),
    "moves to the right": ((0.15, 0.5), (0.85, 0.5), (0.17, 0.17)),
    "moves up": ((0.5, 0.82), (0.5, 0.18), (0.17, 0.17)),
    "moves down": ((0.5, 0.18), (0.5, 0.82), (0.17, 0.17)),
    "grows": ((0.5, 0.5), (0.5, 0.5), (0.08, 0.42)),
    "shrinks": ((0.5, 0.5), (0.5, 0.5), (0.42, 0.08)),
}
COMBINATIONS = tuple(product(COLOURS, SHAPES, MOTIONS))


@dataclass(frozen=True)
class Scene:
    """One shape, shown from begin_s to end_s."""

    begin_s: float
    end_s: float
    colour: str
    shape: str
    motion: str
    shift: tuple[float, float]  # offset of the whole path, as fractions of width and height

    @property
    def text(self) -> str:
        return f"a {self.colour} {self.shape} {self.motion}"

    @property
    def labels(self) -> dict[str, str]:
        return {"label_colour": self.colour, "label_shape": self.shape, "label_motion": self.motion}


def plan_scenes(*, duration_s: float, seed: int, split: str, number: int) -> list[Scene]:
    """Plan scenes that fill a video: the one with index `number` in `split`.

    All videos of a split draw from one shuffled deck of all combinations, so that few sentences are repeated before
    most of them have occurred. The content of a video does not depend on the number of videos.
    """
    rng = random.Random(f"{seed} {split} {number}")
    most_scenes = int(duration_s / SHORTEST_SCENE_S) + 1
    scenes: list[Scene] = []
    begin_s = 0.0
    while begin_s < duration_s:
        end_s = round(begin_s + rng.uniform(SHORTEST_SCENE_S, LONGEST_SCENE_S), 2)
        if duration_s - end_s < SHORTEST_SCENE_S:
            end_s = duration_s
        colour, shape, motion = _card(seed, split, number * most_scenes + len(scenes))
        shift = (rng.uniform(-0.1, 0.1), rng.uniform(-0.1, 0.1))
        scenes.append(Scene(begin_s, end_s, colour, shape, motion, shift))
        begin_s = end_s
    return scenes


def draw_scenes(scenes: list[Scene], *, fps: Fraction, num_frames: int, seed: int) -> Iterator[np.ndarray]:
    """Yield frames as yuv420p, uint8[HEIGHT * 3 / 2, WIDTH], on a plain background."""
    ground = _ground(seed)
    scene_number = 0
    for n in range(num_frames):
        time_s = float(n / fps)
        while time_s >= scenes[scene_number].end_s and scene_number + 1 < len(scenes):
            scene_number += 1
        frame = ground.copy()
        _draw(frame, scenes[scene_number], time_s)
        yield frame


def _card(seed: int, split: str, position: int) -> tuple[str, str, str]:
    deck, position = divmod(position, len(COMBINATIONS))
    order = list(COMBINATIONS)
    random.Random(f"{seed} {split} deck {deck}").shuffle(order)
    return order[position]


def _ground(seed: int) -> np.ndarray:
    """Return the background: one dark level with a weak colour.

    It has no texture. Random per-pixel texture cannot be predicted from its surroundings, unlike that of natural
    videos, and would dominate the loss of a masked autoencoder.
    """
    rng = np.random.default_rng(seed)
    frame = np.empty((HEIGHT * 3 // 2, WIDTH), np.uint8)
    frame[:HEIGHT] = rng.integers(50, 100)
    for plane in frame[HEIGHT:].reshape(2, HEIGHT // 2, WIDTH // 2):
        plane[:] = rng.integers(122, 134)
    return frame


def _draw(frame: np.ndarray, scene: Scene, time_s: float) -> None:
    done = (time_s - scene.begin_s) / (scene.end_s - scene.begin_s)
    (x0, y0), (x1, y1), (radius0, radius1) = MOTIONS[scene.motion]
    radius = HEIGHT * (radius0 + (radius1 - radius0) * done)
    x = WIDTH * (x0 + (x1 - x0) * done + scene.shift[0])
    y = HEIGHT * (y0 + (y1 - y0) * done + scene.shift[1])
    # The bounding box of the shape, aligned to even pixels because chroma has half the resolution.
    left, top = max(0, int(x - radius) & ~1), max(0, int(y - radius) & ~1)
    right, bottom = min(WIDTH, int(x + radius + 2) & ~1), min(HEIGHT, int(y + radius + 2) & ~1)
    if left >= right or top >= bottom:
        return
    inside = _inside(scene.shape, np.arange(left, right)[None] - x, np.arange(top, bottom)[:, None] - y, radius)
    luma, *chroma = COLOURS[scene.colour]
    frame[top:bottom, left:right][inside] = luma
    planes = frame[HEIGHT:].reshape(2, HEIGHT // 2, WIDTH // 2)
    for plane, level in zip(planes, chroma, strict=True):
        plane[top // 2 : bottom // 2, left // 2 : right // 2][inside[::2, ::2]] = level


def _inside(shape: str, dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    match shape:
        case "circle":
            return dx * dx + dy * dy <= radius * radius
        case "square":
            return (abs(dx) <= 0.8 * radius) & (abs(dy) <= 0.8 * radius)
        case "triangle":
            return (dy <= 0.8 * radius) & (2 * abs(dx) <= dy + radius)
        case "cross":
            arm = 0.3 * radius
            return ((abs(dx) <= arm) & (abs(dy) <= radius)) | ((abs(dy) <= arm) & (abs(dx) <= radius))
    raise ValueError(f"no shape is called {shape!r}")
