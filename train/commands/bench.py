"""The commands `train bench` and `train bench TASK`. They have the flags of the task's training command."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.progress import Activity
from clipmill.train.commands.training import docstring
from clipmill.train.config import fields as groups
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.fields import FIRST_RUN
from clipmill.train.config.files import Provenance
from clipmill.train.config.shards import require_paths
from clipmill.train.config.training import Strategy
from clipmill.train.losses.settings import Exchange
from clipmill.train.registry import DEFAULT, find_task, tasks
from clipmill.train.spec import TaskSpec

_MANY = Parameter(negative="", consume_multiple=True)


@dataclass(frozen=True, kw_only=True)
class DistributedFlags:
    """Flags for benchmarks with several processes."""

    strategies: Annotated[list[Strategy] | None, groups.PARALLEL, _MANY] = None
    """Strategies to measure, one after another, with several processes. Default: --parallel.strategy."""
    exchanges: Annotated[list[Exchange] | None, groups.PARALLEL, _MANY] = None
    """Exchanges of a contrastive loss to measure, one after another, with several processes: scalars (FastCLIP, as in
    training) or features (OpenCLIP, the baseline in FastCLIP's tables). Default: scalars for a contrastive loss."""
    page: Annotated[Path | None, groups.WHERE] = None
    """HTML file for the breakdown of a step, with a figure; needs several processes."""


_ONE_PROCESS = DistributedFlags()


def bench_command(name: str) -> Callable[..., None]:
    """Return the cyclopts command that profiles a task."""
    spec = find_task(name)
    kind = spec.settings
    default = kind()

    def command(
        settings: kind = default,  # type: ignore[valid-type]
        *,
        preset: Annotated[str | None, groups.WHERE, FIRST_RUN] = None,
        config: Annotated[list[Path] | None, groups.WHERE, FIRST_RUN, Parameter(negative="")] = None,
        seconds: Annotated[float, groups.WHERE, FIRST_RUN] = 3.0,
        distributed: Annotated[DistributedFlags, Parameter(name="*")] = _ONE_PROCESS,
        as_json: Annotated[bool, groups.WHERE, FIRST_RUN, Parameter(name="--json", negative="")] = False,
        provenance: Annotated[Provenance | None, Parameter(parse=False)] = None,
    ) -> None:
        if (page := distributed.page) is not None and not page.parent.is_dir():
            raise UserError(
                f"--page is {page}, but there is no folder {page.parent}",
                hint="use a file in an existing folder",
                flags=("--page",),
            )
        if provenance is not None and os.environ.get("RANK", "0") == "0":
            for remark in provenance.remarks:
                print(remark, file=sys.stderr)
        _measure(spec, settings, seconds=seconds, distributed_flags=distributed, as_json=as_json)

    training_command = f"train {name} (the default task)" if name == DEFAULT else f"train {name}"
    command.__doc__ = docstring(
        f"Profile the input pipeline and training step of {training_command}, and report the bottleneck.\n\n"
        "The benchmark measures the disk, the loader and its stages, the model, and the time and memory of complete "
        "steps. With several processes (torchrun), it instead breaks down the time of a step into computation and "
        "communication.",
        example=f"train bench{'' if name == DEFAULT else f' {name}'} --shards data --preset tiny",
        preset="Named settings, listed below. Flags and --config files override them.",
        config="YAML file of settings. Keys are spelled like the flags; later files override earlier files.",
        seconds="Duration of the measurement of each stage, in seconds.",
        as_json="Print the result as one JSON object.",
    )
    return command


def _measure(
    spec: TaskSpec,
    settings: ClipSettings,
    *,
    seconds: float,
    distributed_flags: DistributedFlags,
    as_json: bool,
) -> None:
    require_paths(shards=settings.folders, init=settings.init.sources)
    with Activity("importing torch"):
        from clipmill.shards.dataset import reading_variants
        from clipmill.train.bench.communication import print_breakdown, run_breakdown, write_breakdown
        from clipmill.train.bench.run import print_report, run_bench
        from clipmill.train.data.variants import choose_variants
        from clipmill.train.device.precision import choose_device
        from clipmill.train.distributed.launch import open_world
        from clipmill.train.engine.rank_consistency import SAME_LAUNCH, launch_facts

    start = launch_facts(settings, resume=None)
    device_type = choose_device(settings.device, needs_gpu=settings.require_gpu).type
    with (
        open_world(device_type=device_type, start=start, hint=SAME_LAUNCH) as world,
        reading_variants(choose_variants(settings.folders, settings.variant, cache=settings.cache)),
    ):
        if world.size == 1:
            for name, value in asdict(distributed_flags).items():
                if value:
                    raise UserError(
                        f"--{name} needs several processes, but there is only one",
                        hint=f"omit --{name}, or launch with torchrun --nproc-per-node 2 --no-python train bench",
                        flags=(f"--{name}",),
                    )
            result = run_bench(spec, settings, seconds=seconds)
        else:
            result = run_breakdown(
                spec,
                settings,
                strategies=distributed_flags.strategies or [settings.parallel.strategy],
                exchanges=distributed_flags.exchanges or [None],
                seconds=seconds,
                world=world,
            )
        if not world.is_first:
            return
        if distributed_flags.page is not None:
            write_breakdown(result, distributed_flags.page)
        if as_json:
            print(json.dumps(result))
        elif world.size == 1:
            print_report(result)
        else:
            print_breakdown(result)


bench = App(name="bench")
bench.default(bench_command(DEFAULT))
for _task in tasks():
    bench.command(bench_command(_task.name), name=_task.name)
