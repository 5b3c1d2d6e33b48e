"""A result of `train eval` as a table with its protocol: what the console prints and the results page shows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from train.run.folder import other_data

DIRECTIONS = {"text_to_video": "text → video", "video_to_text": "video → text"}
# The first one is the number by which captioners are compared.
_CAPTION_COLUMNS = {
    "cider_d": "CIDEr-D",
    "bleu4": "BLEU-4",
    "meteor": "METEOR",
    "rouge_l": "ROUGE-L",
    "cider": "CIDEr",
    "spice": "SPICE",
    "exact_match": "exact match",
}
_LABEL_WIDTH, _CELL_WIDTH = 14, 13
_FEW = 5  # classes, of which the first five cannot be wrong


@dataclass(frozen=True)
class Cell:
    """A number as text, and what chance reaches; shares in [0, 1] where it is one."""

    text: str
    chance: str = ""
    share: float | None = None
    chance_share: float | None = None


@dataclass(frozen=True)
class Row:
    """One direction of a protocol; `detail` says how many were asked among how many."""

    label: str
    detail: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Numbers, and everything that must be known to compare them with others."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    protocol: dict[str, str]


def table_of(result: dict[str, Any]) -> Table:
    """The table of a result file."""
    makers: dict[str, Callable[[dict[str, Any]], Table]] = {
        "retrieval": _retrieval,
        "mir": _mir,
        "zero-shot": _zero_shot,
        "classification": _classification,
        "probe": _probe,
        "reconstruction": _reconstruction,
        "captions": _captions,
    }
    return makers[result["evaluation"]](result)


def describe(result: dict[str, Any]) -> str:
    """The table as text, chance under each row and the protocol under all."""
    table = table_of(result)
    width = max(_LABEL_WIDTH, *(len(row.label) for row in table.rows))
    lines = [_line("", table.columns, width=width)]
    for row in table.rows:
        lines.append(_line(row.label, [cell.text for cell in row.cells], width=width))
        if any(cell.chance for cell in row.cells):
            lines.append(_line("  by chance", [cell.chance for cell in row.cells], width=width))
    return "\n".join([*lines, *(f"{name}: {text}" for name, text in table.protocol.items())])


def percent(share: float | None) -> str:
    """A share in percent, or a dash where there is none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def _line(label: str, cells: tuple[str, ...] | list[str], *, width: int) -> str:
    return f"{label:{width}}" + "".join(f"{cell:>{_CELL_WIDTH}}" for cell in cells)


def _share(share: float | None, chance: float | None = None) -> Cell:
    return Cell(percent(share), "" if chance is None else percent(chance), share, chance)


def _retrieval(result: dict[str, Any]) -> Table:
    rows = []
    for key, name in DIRECTIONS.items():
        scores = result[key]
        cells = [_share(share, scores["chance"][k]) for k, share in scores["recall"].items()]
        cells.append(Cell(f"{scores['median_rank']:.1f}", f"{scores['chance_median_rank']:.0f}"))
        detail = f"{scores['num_queries']:,} queries, {scores['gallery_size']:,} to choose from"
        rows.append(Row(name, detail, tuple(cells)))
    to_video, to_text = (result[key] for key in DIRECTIONS)
    sizes = f"{to_video['num_queries']} distinct texts, {to_text['num_queries']} clips"
    columns = (*(f"R@{k}" for k in to_video["recall"]), "median rank")
    return Table("Text-video retrieval", columns, tuple(rows), _protocol(result, sizes))


def _mir(result: dict[str, Any]) -> Table:
    rows = []
    for key in ("video_to_text", "text_to_video"):
        scores = result[key]
        cells = (
            _share(scores["mean_ap"], scores["chance_mean_ap"]),
            _share(scores["ndcg"], scores["chance_ndcg"]),
        )
        detail = f"{scores['num_queries']:,} queries, {scores['gallery_size']:,} to rank"
        rows.append(Row(DIRECTIONS[key], detail, cells))
    average = result["average"]
    rows.append(Row("average", "of both directions", (_share(average["mean_ap"]), _share(average["ndcg"]))))
    protocol = _protocol(result, result["coverage"], relevancy=result["relevancy"], left_out=_undefined(result))
    return Table("Multi-instance retrieval (EK-100 MIR)", ("mAP", "nDCG"), tuple(rows), protocol)


def _zero_shot(result: dict[str, Any]) -> Table:
    top, chance = result["top"], result["chance"]
    cells = [_share(share, chance[k]) for k, share in top.items()]
    cells.append(_share(result["mean_class_accuracy"], next(iter(chance.values()))))
    detail = f"{result['num_clips']:,} clips, {result['num_classes']:,} classes"
    left_out = f"{result['num_without_class']:,} clips without a class" if result["num_without_class"] else ""
    classes = f"{result['classes']}, {result['num_classes_seen']:,} of them have clips; {result['prompts']}"
    protocol = _protocol(result, f"{result['num_clips']:,} clips", classes=classes, left_out=left_out)
    columns = (*(f"top-{k}" for k in top), "mean class")
    return Table("Zero-shot classification", columns, (Row("accuracy", detail, tuple(cells)),), protocol)


def _classification(result: dict[str, Any]) -> Table:
    rows = []
    for name, num_classes in result["num_classes"].items():
        shares = [result["numbers"][f"{name}_{key}"] for key in ("top1", "top5", "mean_class")]
        chances = [min(k / num_classes, 1.0) for k in (1, 5, 1)]
        cells = [_share(share, chance) for share, chance in zip(shares, chances, strict=True)]
        if num_classes <= _FEW:
            cells[1] = _share(None)
        rows.append(Row(name, f"{result['num_samples']:,} clips, {num_classes:,} classes", tuple(cells)))
    protocol = _protocol(result, f"{result['num_samples']:,} clips")
    return Table("Classification", ("top-1", "top-5", "mean class"), tuple(rows), protocol)


def _reconstruction(result: dict[str, Any]) -> Table:
    loss, flat = result["loss"], result["flat_loss"]
    explained = 1 - loss / flat if flat else None
    cells = (
        Cell(f"{loss:.4f}"),
        Cell(f"{flat:.4f}"),
        Cell(percent(explained), share=None if explained is None else min(max(explained, 0.0), 1.0)),
    )
    detail = f"{result['num_samples']:,} clips, {percent(result['share_hidden'])} hidden"
    more = {"mask": result["mask"], "split": result["split_chosen"]}
    protocol = _protocol(result, f"{result['num_samples']:,} clips", **more)
    columns = ("loss", "flat cubes", "explained")
    return Table(
        "Reconstruction of hidden cubes", columns, (Row(f"clips of {result['split']}", detail, cells),), protocol
    )


def _captions(result: dict[str, Any]) -> Table:
    shown = [name for name in _CAPTION_COLUMNS if name in result["means"]]
    constant = result["constant"]
    rows = [
        ("captions", f"{result['num_samples']:,} clips, {result['num_references']:,} references", result["means"]),
        ("one for all", "the same caption of every clip", constant["means"]),
    ]
    table_rows = []
    for label, detail, means in rows:
        cells = [_caption_cell(name, means.get(name)) for name in shown]
        cells.append(Cell(f"{result['loss']:.3f}" if label == "captions" else "-"))
        table_rows.append(Row(label, detail, tuple(cells)))
    absent = "; ".join(f"no {_CAPTION_COLUMNS[name]}: {reason}" for name, reason in result["absent"].items())
    protocol = _protocol(
        result,
        f"{result['num_samples']:,} clips (hash of their names {result['ids_hash']}); all numbers times 100",
        captions=result["decoding"],
        loss=result["loss_rule"],
        one_for_all=f"“{constant['caption']}”: {constant['chosen']}",
        left_out=absent,
    )
    columns = (*(_CAPTION_COLUMNS[name] for name in shown), "loss")
    return Table("Captions", columns, tuple(table_rows), protocol)


def _caption_cell(name: str, value: float | None) -> Cell:
    if value is None:
        return Cell("-")
    # CIDEr has no largest value that a bar could be measured by.
    return Cell(f"{100 * value:.1f}", share=None if name.startswith("cider") else min(max(value, 0.0), 1.0))


def _probe(result: dict[str, Any]) -> Table:
    methods = {"knn": "k-NN", "linear": "linear"}
    rows, left_out = [], []
    for one in result["findings"]:
        found, chance = one["found"], one["chance"]
        cells = [_share(found[name], chance[name]) for name in ("top1", "top5", "mean_class")]
        if one["num_classes"] <= _FEW:
            cells[1] = _share(None)
        words = [one["label"], methods[one["method"]], *(["random"] if one["encoder"] == "random" else [])]
        detail = f"{one['num_samples']:,} clips, {one['num_bank']:,} in the bank, {one['num_classes']:,} classes"
        detail += "" if one["l2"] is None else f", L2 {one['l2']:g}"
        rows.append(Row(", ".join(words), detail, tuple(cells)))
        if one["num_unseen"]:
            left_out.append(
                f"{one['num_unseen']:,} clips of {one['num_unseen_classes']:,} classes of {one['label']} "
                f"that the bank lacks: never right"
            )
    sizes = "; ".join(dict.fromkeys(left_out))
    protocol = _protocol(
        result,
        f"{result['num_samples']:,} clips",
        bank=result["bank"],
        features=result["features"],
        unseen=sizes,
    )
    return Table("Probes of frozen features", ("top-1", "top-5", "mean class"), tuple(rows), protocol)


def _protocol(result: dict[str, Any], sizes: str, **more: str) -> dict[str, str]:
    data = f"{result['data']}; {result['variant']}"
    if address := other_data(result):
        data += f"; of {address}, which is not the run's own data"
    lines = {"data": data, "protocol": f"{sizes}; {result['protocol']}"}
    lines |= {name.replace("_", " "): text for name, text in more.items() if text}
    return lines | {"clip": result["clip"], "checkpoint": f"step {result['step']}, {result['weights']}"}


def _undefined(result: dict[str, Any]) -> str:
    parts = []
    for direction, queries in (("video_to_text", "clips"), ("text_to_video", "sentences")):
        scores = result[direction]
        if scores["num_without_ap"]:
            parts.append(f"{scores['num_without_ap']:,} {queries} with nothing of relevancy 1 have no AP")
        if scores["num_without_ndcg"]:
            parts.append(f"{scores['num_without_ndcg']:,} {queries} with nothing relevant have no nDCG")
    return "; ".join(parts)
