"""Print the results of a benchmark as a Markdown table, and write them to a JSON file."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment


def parser_for(description: str) -> argparse.ArgumentParser:
    """Return a parser with the docstring of a benchmark as its description, and the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    return parser


Rows = Sequence[Mapping[str, Any]]


def print_report(
    title: str,
    rows: Rows,
    *,
    notes: Sequence[str],
    json_path: Path | None,
    further: Mapping[str, Rows] | None = None,
    figures: Mapping[str, object] | None = None,
) -> None:
    """Print a table whose columns are the keys of the rows.

    Args:
        notes: Lines below the table, such as the targets.
        json_path: JSON file to write with the same results.
        further: Additional tables of the same run, by title.
        figures: Additional figures, which are written only to the JSON file.
    """
    where = describe_environment()
    print(f"### {title}\n")
    print(
        f"{where['machine']}; Python {where['python']}, ffmpeg {where['ffmpeg']}; "
        f"commit {where['commit']}, {where['date']}\n"
    )
    print("\n".join(table(rows)))
    for other_title, other_rows in (further or {}).items():
        print(f"\n#### {other_title}\n")
        print("\n".join(table(other_rows)))
    print("".join(f"\n{note}" for note in notes), flush=True)
    if json_path is not None:
        content: dict[str, object] = {"benchmark": title, **where, **(figures or {})}
        content |= {"rows": [dict(row) for row in rows], "notes": list(notes)}
        if further:
            content["further"] = {name: [dict(row) for row in table] for name, table in further.items()}
        json_path.write_text(json.dumps(content, indent=1) + "\n")


def table(rows: Rows) -> list[str]:
    """Format a Markdown table with the columns of all rows, except columns without values."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    columns = [key for key in columns if any(row.get(key) is not None for row in rows)]
    headings = ["variant" if key == "way" else key for key in columns]
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(cell(row.get(key)) for key in columns)} |" for row in rows]


def cell(value: object) -> str:
    """Format a table cell: a number with at least three digits, None as an empty cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else " ".join(str(value).split()).replace("|", "\\|")
