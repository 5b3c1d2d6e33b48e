"""The table that `train bench` prints."""

from typing import Any

_WHAT = {
    "read": "bytes of the packets that are needed",
    "decode": "packets to frames",
    "crop": "cut out and resize planes",
    "tokens": "captions to tokens",
    "collate": "samples to a batch",
    "transfer": "host to device",
    "augment": "planes to pictures, jitter, blur, normalise",
    "model": "forward, backward, step",
}


def print_report(result: dict[str, Any]) -> None:
    """Prints a result of `train.bench.run.run_bench`."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    settings = result["settings"]
    console.print(
        f"data: {result['data']}; {result['variant']}\n"
        f"on: {result['machine']}; batches of {settings['batch']} clips of {settings['num_frames']} frames, "
        f"{settings['size_px']} px, model {settings['model']}",
        markup=False,
    )
    table = Table("link", "what it does", box=None, padding=(0, 2, 0, 0))
    for name in ("items/s", "ms an item"):
        table.add_column(name, justify="right")
    for link in result["links"]:
        mark = " ←" if link["link"] == result["slowest"] else ""
        table.add_row(link["link"] + mark, _WHAT[link["link"]], *_cells(link["items_per_s"]))
    table.add_section()
    table.add_row("loader", f"disk to batches, {settings['workers']} workers", *_cells(result["loader_items_per_s"]))
    table.add_row("compute", "augment, then model", *_cells(result["compute_items_per_s"]))
    table.add_row("step", "all of it, overlapping", *_cells(result["step_items_per_s"]))
    console.print(table)
    for line in _conclusion(result):
        console.print(line, markup=False)


def _cells(items_per_s: float | None) -> tuple[str, str]:
    return ("not needed", "") if items_per_s is None else (f"{items_per_s:,.1f}", f"{1000 / items_per_s:,.3f}")


def _conclusion(result: dict[str, Any]) -> list[str]:
    loader, compute = result["loader_items_per_s"], result["compute_items_per_s"]
    if result["bound"] == "data":
        meaning = f"data-bound: the loader gives {loader:,.1f} items/s, augment and model would take {compute:,.1f}"
        meaning += f"; they would wait for {result['expected_wait_share']:.0%} of a step"
    else:
        meaning = f"compute-bound: augment and model take {compute:,.1f} items/s, the loader could give {loader:,.1f}"
    lines = [
        f"slowest link: {result['slowest']}",
        f"{meaning}; measured: {result['wait_share']:.0%} of a step is waiting for data",
        f"a sample takes {result['read_bytes_per_item'] / 1000:,.0f} kB from the disk",
    ]
    if result["cause"] != result["slowest"]:
        lines.append(f"what holds up the step is {result['cause']}: the links before the model add up in each thread")
    if result["device"] == "cpu":
        lines.append("the model runs on the cores that decode: together each is slower than alone")
    lines += [f"what to change ({result['cause']}): {advice}" for advice in result["advice"]]
    if result["num_failed"]:
        lines.append(f"{result['num_failed']} samples could not be had; the first: {result['first_failure']}")
    return lines
