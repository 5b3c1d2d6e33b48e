"""The column `scores`: its settings and its `ColumnSpec`."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.settings import Checked, Range
from clipmill.prep.core.column import ColumnSpec
from clipmill.shards.columns import SCORES

_METHODS = Parameter(group=Group("Scores", sort_key=1))


@dataclass(frozen=True, kw_only=True)
class ScoresSettings(Checked):
    """Settings of `prep scores`."""

    cut_threshold: Annotated[float, _METHODS, FIRST_RUN, Range(1, 255)] = 27.0
    """Threshold of PySceneDetect's ContentDetector for a shot cut, 1 to 255. A lower threshold finds more cuts, but
    also mistakes fast motion for cuts."""


COLUMN = ColumnSpec(
    name=SCORES,
    package="clipmill.prep.scores",
    work="clipmill.prep.scores.work:WORK",
    check_sample="clipmill.prep.scores.score:check_scores",
    settings=ScoresSettings,
    schema=3,  # increment it when a change of methods, frames or thresholds changes values for the same settings
    help="""
    Score the chunks: motion, sharpness, brightness, black and frozen frames, bars, cuts, speech, perceptual hash.

    The command scores the chunks of the current variant of the column `video`. Each run scores only chunks that are
    new or changed, or whose scores are missing or damaged. After the chunks have been re-encoded, run the command
    again; until then, the existing scores are kept.

    Example:

        prep scores
    """,
    verb="score",
    has_hours=False,
    page="the distribution of each score with example pictures, and the chunks that --where keeps and drops",
)
