"""`train bench` and its flags."""

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from train.config import fields as groups
from train.config.fields import FIRST_RUN
from train.tasks.dual_encoder.settings import DualEncoderSettings


def bench(
    settings: DualEncoderSettings = DualEncoderSettings(),  # noqa: B008 - frozen
    *,
    preset: Annotated[str | None, groups.WHERE, FIRST_RUN] = None,
    config: Annotated[list[Path] | None, groups.WHERE, FIRST_RUN, Parameter(negative="")] = None,
    seconds: Annotated[float, groups.WHERE, FIRST_RUN] = 3.0,
    as_json: Annotated[bool, groups.WHERE, FIRST_RUN, Parameter(name="--json", negative="")] = False,
) -> None:
    """Profile the input pipeline and training step of a dual encoder, and report the bottleneck.

    Example:

        train bench --shards data --preset tiny

    Parameters
    ----------
    preset
        Named settings, listed below. Flags and --config files override them.
    config
        YAML file of settings. Keys are spelled as the flags; later files override earlier ones.
    seconds
        Time to measure each stage for, in seconds.
    as_json
        Print one JSON object.
    """
    from train.bench.rates import print_report
    from train.bench.run import run_bench

    result = run_bench(settings, seconds=seconds)
    if as_json:
        print(json.dumps(result))
    else:
        print_report(result)
