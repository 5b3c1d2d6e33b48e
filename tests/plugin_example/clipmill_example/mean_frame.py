"""A tower: the mean of a clip's frames, on a coarse grid, through two layers; `--towers.kind mean-frame`."""

from clipmill.train.config.model import TowerSpec

MEAN_FRAME = TowerSpec(name="mean-frame", build="clipmill_example.mean_frame_tower:MeanFrame")
