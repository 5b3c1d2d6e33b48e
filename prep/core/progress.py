"""Progress of a run on standard error: finished samples, speed relative to real time, time left, and failures."""

import sys
from collections import Counter
from types import TracebackType
from typing import Self

from clipmill.manifests.errors import Stopped
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.progress import Activity, ProgressRate, join_parts
from clipmill.prep.engines import RefusedNode


class RunProgress:
    """Context manager that shows the progress of a run.

    A KeyboardInterrupt or `Stopped` is raised again with a message about the finished shards, which are kept.

    Args:
        activity: Present participle for the work, such as "encoding".
        noun: Noun for a sample of the column, singular.
        num_samples: Number of samples that the run will make.
        work: Total work, from which the time left is computed. A sample that is made counts as 1, and a copied sample
            as much less.
        sample_s: Seconds of video in a sample; None to omit the speed.
        num_shards: Number of shards that the run will make.
    """

    def __init__(
        self, activity: str, *, noun: str, num_samples: int, work: float, sample_s: float | None, num_shards: int
    ) -> None:
        self._noun, self._num_samples, self._sample_s = noun, num_samples, sample_s
        self._work, self._work_done, self._done = work, 0.0, 0
        self._num_shards, self._num_shards_made, self._num_kept = num_shards, 0, 0
        self._has_begun = False
        self._failures: Counter[str] = Counter()
        self._pace = ProgressRate()
        self._activity = Activity(activity)

    def __enter__(self) -> Self:
        self._activity.__enter__()
        self.show(0, 0.0, has_begun=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._activity.__exit__(kind, error, trace)
        if isinstance(error, Stopped):
            raise Stopped(
                f"finished work is kept; {self._finished_text()}; run the same command again to resume"
            ) from None
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(self._finished_text()) from None

    def start(self) -> None:
        """Start measuring the speed. Call this method when the workers are ready."""
        self._pace = ProgressRate()

    def finish_shard(self, num_samples: int) -> None:
        """Count a committed shard and its samples."""
        self._num_shards_made += 1
        self._num_kept += num_samples

    def fail(self, code: str) -> None:
        """Count a failure."""
        self._failures[code] += 1

    def show(self, num_done: int, work_done: float, *, has_begun: bool) -> None:
        """Update the display.

        Args:
            num_done: Number of finished samples, including samples of running shards.
            work_done: Finished work, in the unit of `work`.
            has_begun: True if a worker has started a shard.
        """
        self._has_begun = self._has_begun or has_begun or num_done > 0
        self._done = max(self._done, min(num_done, self._num_samples))
        self._work_done = max(self._work_done, min(work_done, self._work))
        self._pace.add(self._work_done)
        self._activity.say(self._text, fraction=self._done / max(1, self._num_samples))

    def _text(self) -> str:
        state = ""
        if self._done == self._num_samples:
            state = "publishing the last shards"
        elif not self._has_begun:
            state = "starting workers"
        elif (speed := self._pace.per_s) > 0:
            state = self._pace.rate() if self._sample_s is None else f"{speed * self._sample_s:,.1f}x real time"
        failures = ", ".join(f"{count} x {code}" for code, count in sorted(self._failures.items()))
        text = join_parts(
            f"{self._done:,} of {count_noun(self._num_samples, self._noun)}", state, self._pace.time_left(self._work)
        )
        return f"{text}; failed: {failures}" if failures else text

    def _finished_text(self) -> str:
        num_made = f"{self._num_shards_made:,} of {count_noun(self._num_shards, 'shard')}"
        text = f"this run has finished {num_made} ({count_noun(self._num_kept, self._noun)})"
        num_lost = self._done - self._num_kept
        if num_lost > 0:
            text += f"; {count_noun(num_lost, self._noun)} of unfinished shards will be made again"
        return text


def warn_refused(refused: RefusedNode) -> None:
    """Print a warning that a node was excluded, with the reason."""
    print(f"warning: {refused.node} is excluded from the run: {refused.reason}", file=sys.stderr, flush=True)
