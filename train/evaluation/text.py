"""A result as lines of text: the numbers as a table, and under it the protocol that they belong to."""

from collections.abc import Callable
from typing import Any

DIRECTIONS = {"text_to_video": "text → video", "video_to_text": "video → text"}
_LABEL_WIDTH = 14


def describe(result: dict[str, Any]) -> str:
    """The table of a result of `train eval`, protocol and chance beside the numbers."""
    tables: dict[str, Callable[[dict[str, Any]], list[str]]] = {
        "retrieval": _retrieval,
        "mir": _mir,
        "zero-shot": _zero_shot,
    }
    rows = tables[result["evaluation"]](result)
    rows += [f"{name}: {text}" for name, text in protocol_lines(result).items()]
    return "\n".join(rows)


def protocol_lines(result: dict[str, Any]) -> dict[str, str]:
    """Everything that must be known to compare the numbers of a result with others."""
    lines = {"data": f"{result['data']}; {result['variant']}", "protocol": result["protocol"]}
    if result["evaluation"] == "retrieval":
        to_video, to_text = (result[key] for key in DIRECTIONS)
        sizes = f"{to_video['num_queries']} distinct texts, {to_text['num_queries']} clips"
        lines["protocol"] = f"{sizes}; {result['protocol']}"
    elif result["evaluation"] == "mir":
        lines["relevancy"] = f"{result['relevancy']}; {result['coverage']}"
        if undefined := _undefined(result):
            lines["left out"] = undefined
    else:
        lines["classes"] = f"{result['classes']}, {result['num_classes_seen']} of them have clips; {result['prompts']}"
        if result["num_without_class"]:
            lines["left out"] = f"{result['num_without_class']} clips without a class"
    lines["clip"] = result["clip"]
    lines["checkpoint"] = f"step {result['step']}, {result['weights']}"
    return lines


def _undefined(result: dict[str, Any]) -> str:
    parts = []
    for direction, queries in (("video_to_text", "clips"), ("text_to_video", "sentences")):
        scores = result[direction]
        if scores["num_without_ap"]:
            parts.append(f"{scores['num_without_ap']} {queries} with nothing of relevancy 1 have no AP")
        if scores["num_without_ndcg"]:
            parts.append(f"{scores['num_without_ndcg']} {queries} with nothing relevant have no nDCG")
    return "; ".join(parts)


def _retrieval(result: dict[str, Any]) -> list[str]:
    rows = [_row("", *(f"R@{k}" for k in (1, 5, 10)), "median rank")]
    for key, name in DIRECTIONS.items():
        scores = result[key]
        for label, shares, median in (
            (name, scores["recall"], scores["median_rank"]),
            ("  by chance", scores["chance"], scores["chance_median_rank"]),
        ):
            rows.append(_row(label, *(percent(share) for share in shares.values()), f"{median:.1f}"))
    return rows


def _mir(result: dict[str, Any]) -> list[str]:
    rows = [_row("", "mAP", "nDCG")]
    for key in ("video_to_text", "text_to_video"):
        scores = result[key]
        rows.append(_row(DIRECTIONS[key], percent(scores["mean_ap"]), percent(scores["ndcg"])))
        rows.append(_row("  by chance", percent(scores["chance_mean_ap"]), percent(scores["chance_ndcg"])))
    rows.append(_row("average", percent(result["average"]["mean_ap"]), percent(result["average"]["ndcg"])))
    return rows


def _zero_shot(result: dict[str, Any]) -> list[str]:
    top, chance = result["top"], result["chance"]
    return [
        _row("", "top-1", "top-5", "mean class"),
        _row("accuracy", *(percent(share) for share in top.values()), percent(result["mean_class_accuracy"])),
        _row("  by chance", *(percent(share) for share in chance.values()), percent(next(iter(chance.values())))),
    ]


def _row(label: str, *cells: str) -> str:
    return f"{label:{_LABEL_WIDTH}}" + "".join(f"{cell:>13}" for cell in cells)


def percent(share: float | None) -> str:
    """A share in percent, or a dash where there is none."""
    return "-" if share is None else f"{100 * share:.1f} %"
