"""Tower for `--towers.kind mean-frame`: the mean of a clip's frames, on a coarse grid, through two layers."""

from clipmill.train.config.model import TowerSpec

MEAN_FRAME = TowerSpec(name="mean-frame", build="clipmill_example.mean_frame_tower:MeanFrame")
