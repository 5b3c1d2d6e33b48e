"""Cropping and resizing in libav's filter graph, as AVION's decoder does: here to be compared with."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from train.data.decoding.crop import Rectangle
from train.data.decoding.pictures import Planes

if TYPE_CHECKING:
    import av


def crop_clip_in_graph(frames: "Sequence[av.VideoFrame]", rectangle: Rectangle, *, size_px: int) -> Planes:
    """As `train.data.decoding.pictures.crop_clip`, by swscale (bilinear)."""
    from av.filter import Graph

    graph = Graph()
    source = graph.add_buffer(
        width=frames[0].width, height=frames[0].height, format=frames[0].format, time_base=frames[0].time_base
    )
    part = f"{rectangle.width}:{rectangle.height}:{rectangle.left}:{rectangle.top}:exact=1"
    links = [source, graph.add("crop", part), graph.add("scale", f"{size_px}:{size_px}:flags=bilinear")]
    links += [graph.add("format", frames[0].format.name), graph.add("buffersink")]
    graph.link_nodes(*links).configure()
    pictures = []
    for number, frame in enumerate(frames):
        frame.pts = number  # a frame may stand in the list twice, and the graph wants times that rise
        graph.push(frame)
        pictures.append(graph.pull().to_ndarray().reshape(-1))
    return np.stack(pictures)
