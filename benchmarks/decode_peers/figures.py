"""Compute the tables of `benchmarks.decode`, and the figures that have targets."""

import statistics
from dataclasses import dataclass

from benchmarks.decode_peers.chunk_sets import OWN, X264_DEFAULT, X264_SHORT
from benchmarks.decode_peers.clip_costs import DECODE, RESIZE, WHOLE
from benchmarks.decode_peers.clip_set import MAE, SHORT

OURS, OURS_RGB, UNCROPPED, FLOOR = "clipmill", "clipmill, rgb", "clipmill, uncropped", "libavcodec"
DECORD, PYAV, OPENCV = "decord", "PyAV", "OpenCV"
TORCHCODEC = ("torchcodec, exact", "torchcodec, approximate", "torchcodec, kept open")
COSTS, LOADERS = "costs", ("loader, 1 thread", "loader, 2 threads", "loader, 2 processes")
OTHERS = (DECORD, *TORCHCODEC, PYAV, OPENCV)
Case = tuple[str, str, str]  # set of chunks, kind of clip, variant
Rates = dict[Case, list[float]]  # clips per CPU second, one value per round


@dataclass(frozen=True)
class Measured:
    """Measurements of all rounds.

    Attributes:
        costs: CPU microseconds of each step, one value per round, by (set, kind).
        loaders: (Clips per second of wall time, clips per CPU second), one pair per turn, by loader variant.
        wrong: Number of wrong frames that a case returned, and number of frames that were checked.
        missing: Reasons why variants are unavailable.
    """

    rates: Rates
    costs: dict[tuple[str, str], list[dict[str, float]]]
    loaders: dict[str, list[tuple[float, float]]]
    wrong: dict[Case, tuple[int, int]]
    missing: dict[str, str]


def better_of(rates: Rates, cases: list[Case]) -> list[float]:
    """Return the highest rate of the available cases in each round."""
    return [max(of_round) for of_round in zip(*(rates[case] for case in cases if case in rates), strict=True)]


def ratio(rates: list[float], base: list[float]) -> float | None:
    """Return the median of the ratios within each round; None if a variant is unavailable."""
    if not rates or not base:
        return None
    return statistics.median(rate / other for rate, other in zip(rates, base, strict=True))


def ratios_of(measured: Measured, sizes: dict[str, int]) -> dict[str, float | None]:
    """Return the figures that have targets, by name."""
    rates, ours = measured.rates, measured.rates.get((OWN, SHORT, OURS), [])
    floor = rates.get((OWN, SHORT, FLOOR), [])

    def best_of_torchcodec(name: str) -> list[float]:
        return better_of(rates, [(name, SHORT, variant) for variant in TORCHCODEC])

    one, two, processes = ([wall for wall, _ in measured.loaders[name]] for name in LOADERS)
    outside = [1 - (costs[DECODE] + costs[RESIZE]) / costs[WHOLE] for costs in measured.costs.get((OWN, SHORT), [])]
    return {
        "over_decord_x264_default": ratio(ours, rates.get((X264_DEFAULT, SHORT, DECORD), [])),
        "over_torchcodec_own_chunks": ratio(ours, best_of_torchcodec(OWN)),
        **{
            f"over_torchcodec_{name}": ratio(rates.get((name, SHORT, OURS), []), best_of_torchcodec(name))
            for name in (X264_DEFAULT, X264_SHORT)
        },
        "over_decord_own_chunks": ratio(ours, rates.get((OWN, SHORT, DECORD), [])),
        "mae_over_decord_x264_default": ratio(
            rates.get((OWN, MAE, OURS), []), rates.get((X264_DEFAULT, MAE, DECORD), [])
        ),
        "over_libavcodec": ratio(ours, floor),
        "uncropped_over_libavcodec": ratio(rates.get((OWN, SHORT, UNCROPPED), []), floor),
        "outside_libavcodec_and_resize": statistics.median(outside) if outside else None,
        "two_threads_over_one": ratio(two, one),
        "two_threads_over_two_processes": ratio(two, processes),
        "bytes_over_x264_default": sizes[OWN] / sizes[X264_DEFAULT],
    }


def rows_of(measured: Measured, cases: list[Case]) -> list[dict[str, object]]:
    """Return a table row for each case, including unavailable cases."""
    rates = measured.rates
    rows: list[dict[str, object]] = []
    for name, kind, variant in cases:
        own = rates.get((name, kind, variant), [])
        wrong, num_checked = measured.wrong.get((name, kind, variant), (0, 0))
        rows.append(
            {
                "chunks": name,
                "clips": kind,
                "way": variant,
                "clips/CPU s": round(statistics.median(own), 1) if own else "not installed",
                "lowest": round(min(own), 1) if own else None,
                "highest": round(max(own), 1) if own else None,
                "/ decord": ratio(own, rates.get((X264_DEFAULT, kind, DECORD), [])),
                "/ libavcodec": ratio(own, rates.get((name, kind, FLOOR), [])),
                "wrong frames": f"{wrong} of {num_checked}" if own else None,
            }
        )
    return rows


def cost_rows(measured: Measured) -> list[dict[str, object]]:
    """Return rows with the cost of each step: median µs per clip, and the fraction outside libavcodec and resize."""
    rows: list[dict[str, object]] = []
    for (name, kind), rounds in measured.costs.items():
        median = {step: statistics.median(costs[step] for costs in rounds) for step in rounds[0]}
        outside = statistics.median(1 - (costs[DECODE] + costs[RESIZE]) / costs[WHOLE] for costs in rounds)
        steps = {step: round(value) for step, value in median.items()}
        rows.append({"chunks": name, "clips": kind, **steps, "share outside": outside})
    return rows


def size_rows(sizes: dict[str, int], *, num_chunks: int) -> list[dict[str, object]]:
    """Return a table row with the size of each set."""
    return [
        {"chunks": name, "MB a chunk": size / 1e6 / num_chunks, "/ x264 default": size / sizes[X264_DEFAULT]}
        for name, size in sizes.items()
    ]


def loader_rows(measured: Measured) -> list[dict[str, object]]:
    """Return a table row for each loader variant. Ratios are medians of the wall time ratios within each turn."""
    one, _, processes = ([wall for wall, _ in measured.loaders[name]] for name in LOADERS)
    return [
        {
            "way": variant,
            "clips/s": round(statistics.median(wall for wall, _ in rates), 1),
            "lowest": round(min(wall for wall, _ in rates), 1),
            "highest": round(max(wall for wall, _ in rates), 1),
            "/ 1 thread": ratio([wall for wall, _ in rates], one),
            "/ 2 processes": ratio([wall for wall, _ in rates], processes),
            "clips/CPU s": round(statistics.median(cpu for _, cpu in rates), 1),
        }
        for variant, rates in measured.loaders.items()
        if rates
    ]
