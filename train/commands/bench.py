"""`train bench` and its flags."""

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from train.tasks.dual_encoder.settings import DualEncoderSettings


def bench(
    settings: DualEncoderSettings = DualEncoderSettings(),  # noqa: B008 - frozen
    *,
    preset: Annotated[str | None, Parameter(group="Where")] = None,
    config: Annotated[list[Path] | None, Parameter(group="Where", negative="")] = None,
    seconds: Annotated[float, Parameter(group="Where")] = 3.0,
    as_json: Annotated[bool, Parameter(name="--json", group="Where", negative="")] = False,
) -> None:
    """Measures each link from disk to weights with the settings of a training run, and names the slowest.

    Example:

        train bench --shards data --preset tiny

    Parameters
    ----------
    preset
        Settings by name; flags and --config go before them.
    config
        YAML file of settings, keys spelled as the flags; a later file goes before an earlier one.
    seconds
        Time for each link.
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
