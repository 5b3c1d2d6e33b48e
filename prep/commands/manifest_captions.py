"""`prep manifest captions`: captions from tables as further sources of videos that are in the manifest."""

import json as json_module
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun, on_one_line, quote_value
from clipmill.manifests.settings import Range, refuse
from clipmill.prep.core.request import Data

_LIKELIHOOD = Range(most=0, hint="give the logarithm of a probability, 0 or less, such as -1.5")

if TYPE_CHECKING:
    import pyarrow as pa

    from clipmill.manifests.adapters.reading import Reading
    from clipmill.manifests.write import FurtherResult
    from clipmill.prep.core.failure_list import FailureEntry


def captions(
    tables: Annotated[
        list[Path] | None,
        Parameter(
            negative="",
            help="CSV, JSON or Parquet files with the columns video and text, and optionally begin_s, end_s or "
            "duration_s (in seconds), source and likelihood.",
        ),
    ] = None,
    /,
    *,
    remove: Annotated[
        list[str] | None,
        Parameter(
            negative="",
            help="Source to remove, in place of adding tables: a name that prep status shows, or the name of a model "
            "without its version. May be repeated.",
        ),
    ] = None,
    source: Annotated[
        str | None,
        Parameter(
            help="Source name of all captions, in place of the column source of the tables. Default without that "
            "column: the name of the file."
        ),
    ] = None,
    min_likelihood: Annotated[
        float | None,
        Parameter(
            help="Drop captions whose likelihood (mean log-probability per token) is below this value, 0 or less. "
            "Captions without a likelihood are kept."
        ),
    ] = None,
    drop_duplicates: Annotated[
        bool,
        Parameter(
            negative="",
            help="Drop captions that repeat another one of the same clip and source, apart from case and whitespace. "
            "The most likely one is kept.",
        ),
    ] = False,
    data: Data = Path("data"),
    json: Annotated[bool, Parameter(name="--json", negative="", help="Print the summary as JSON.")] = False,
) -> None:
    """Add captions from tables to videos in the manifest, such as tables of `train caption-chunks`, or remove them.

    New captions replace earlier captions of the same source, or of an earlier version of the same model, and no others.
    They are kept when a dataset is read again. Training uses captions of models only if --captions.sources names them.

    Examples:

        prep manifest captions captions.parquet --min-likelihood -1.5
        prep manifest captions --remove captioner
    """
    from clipmill.manifests.adapters.further import Limits, read_caption_tables
    from clipmill.manifests.further_sources import SOURCE_CHARS, is_source_name
    from clipmill.manifests.progress import Activity
    from clipmill.manifests.store import read_rejected_rows, read_videos
    from clipmill.manifests.write import FURTHER, write_further_captions
    from clipmill.prep.commands import manifest_text
    from clipmill.prep.core.data_folder import require_data_folder, writing
    from clipmill.prep.core.failure_list import first_rejected, named_values
    from clipmill.prep.upkeep.caption_sources import chunk_finder, ends_of_videos, other_variants
    from clipmill.shards.columns import VIDEO
    from clipmill.shards.dataset import current_variant

    refuse(_LIKELIHOOD.mistakes("--min-likelihood", min_likelihood))
    if source is not None and not is_source_name(source):
        raise UserError(f"--source {quote_value(source)} is not a name", hint=f"give a name of {SOURCE_CHARS}")
    folder = require_data_folder(data)
    if remove:
        choices = {"tables": tables, "--source": source, "--min-likelihood": min_likelihood}
        _remove(folder, remove, beside={**choices, "--drop-duplicates": drop_duplicates or None}, as_json=json)
        return
    if not tables:
        raise UserError("there are no tables", hint="give tables of captions, or --remove and the name of a source")
    # The lock is held while tables are read, because their rows refer to the videos of the manifest.
    with writing(folder), Activity("reading captions"):
        videos = read_videos(folder)
        limits = Limits(ends_of_videos(folder, videos), chunk_finder(folder, videos))
        read = read_caption_tables(tables, videos=videos, dataset=FURTHER, source=source, limits=limits)
        if manifest_text.unused_files(read.reading):
            raise FailedWork(manifest_text.unused_text(read.reading))
        selected, num_dropped = _select(
            read.reading.captions, min_likelihood=min_likelihood, drop_duplicates=drop_duplicates
        )
        choice = {"min_likelihood": min_likelihood, "drop_duplicates": drop_duplicates}
        written = write_further_captions(
            folder,
            selected,
            read.reading.rejected,
            records={name: {**record, **choice} for name, record in read.records.items()},
        )
        has_rejected = read.reading.rejected.num_rows > 0
        rejected = first_rejected(read_rejected_rows(folder), dataset=FURTHER) if has_rejected else []
    current = current_variant(folder, VIDEO)
    other = {name: other_variants(record["models"], current=current) for name, record in read.records.items()}
    values = {
        **_values(written, reading=read.reading, num_dropped=num_dropped),
        "other_variants": {name: variants for name, variants in other.items() if variants},
    }
    if json:
        print(json_module.dumps({**values, "first_rejected": named_values(rejected)}, indent=1, sort_keys=True))
    else:
        num_files = read.reading.rejected["row"].null_count
        print("\n".join(_lines(written, values, rejected=rejected, num_files_rejected=num_files)))
        print(f"next: {manifest_text.chunk_command(data)}")


def _remove(folder: Path, names: Sequence[str], *, beside: Mapping[str, object], as_json: bool) -> None:
    from clipmill.manifests.progress import Activity
    from clipmill.manifests.store import manifest_dir
    from clipmill.manifests.write import remove_further_sources
    from clipmill.prep.commands.manifest_text import chunk_command
    from clipmill.prep.core.data_folder import writing

    for name, value in beside.items():
        if value is not None:
            raise UserError(f"--remove and {name} exclude each other", hint="run one command after the other")
    with writing(folder), Activity("writing the manifest"):
        removed = remove_further_sources(folder, names)
    if as_json:
        values = {"num_captions_removed": removed, "manifest": os.fspath(manifest_dir(folder))}
        print(json_module.dumps(values, indent=1, sort_keys=True))
        return
    for name, count in removed.items():
        print(f"{on_one_line(name)}: {count_noun(count, 'caption')} removed")
    print(f"manifest: {manifest_dir(folder)}")
    print(f"next: {chunk_command(folder)}")


def _select(
    table: "pa.Table", *, min_likelihood: float | None, drop_duplicates: bool
) -> tuple["pa.Table", dict[str, int]]:
    """Return the captions to keep, and the number of dropped ones by reason.

    Args:
        table: Captions of all sources.

    Raises:
        UserError: There is a minimum, but no caption has a likelihood.
        FailedWork: No caption of a source is left; its earlier captions would be lost.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from clipmill.manifests.previous import is_duplicate, is_unlikely

    num_dropped, kept = {}, table
    if min_likelihood is not None:
        if table["likelihood"].null_count == table.num_rows:
            raise UserError(
                f"--min-likelihood {min_likelihood:g} has no effect: no caption in the tables has a likelihood",
                hint="omit it, or give tables with the column likelihood",
            )
        unlikely = is_unlikely(kept, min_likelihood=min_likelihood)
        num_dropped["unlikely"], kept = int(unlikely.sum()), kept.filter(pa.array(~unlikely))
    if drop_duplicates:
        duplicates = is_duplicate(kept)
        num_dropped["duplicate"], kept = int(duplicates.sum()), kept.filter(pa.array(~duplicates))
    # A source replaces its earlier captions, so an empty one would remove them.
    left = set(pc.unique(kept["source"]).to_pylist())
    for name in pc.unique(table["source"]).to_pylist():
        if name not in left:
            raise FailedWork(
                f"no captions of {name} are left: all are below --min-likelihood {min_likelihood:g}; "
                "the manifest was not changed"
            )
    return kept, num_dropped


def _values(written: "FurtherResult", *, reading: "Reading", num_dropped: dict[str, int]) -> dict[str, Any]:
    reasons = reading.rejected["reason"].value_counts().to_pylist()
    return {
        "sources": {
            name: {
                "num_captions": count,
                "num_captions_added": written.num_added[name],
                "num_captions_removed": written.num_removed[name],
            }
            for name, count in written.num_captions.items()
        },
        "stale": written.num_stale,
        "num_dropped": num_dropped,
        "notes": list(reading.notes),
        "num_captions_lost": reading.num_captions_lost,
        "num_rejected": {entry["values"]: entry["counts"] for entry in reasons},
        "manifest": os.fspath(written.folder),
    }


def _lines(
    written: "FurtherResult", values: dict[str, Any], *, rejected: "Sequence[FailureEntry]", num_files_rejected: int
) -> Iterator[str]:
    from clipmill.manifests.adapters.annotations import Reason
    from clipmill.manifests.caption_spans import is_of_model
    from clipmill.manifests.further_sources import source_name
    from clipmill.prep.commands.manifest_text import ADVICE, rejected_lines

    for name, count in written.num_captions.items():
        changes = f"{written.num_added[name]:,} new"
        if written.num_removed[name]:
            changes += f", {written.num_removed[name]:,} removed"
        yield f"{on_one_line(name)}: {count_noun(count, 'caption')} ({changes})"
    for name, count in written.num_stale.items():
        yield f"stale: {count_noun(count, 'caption')} of {on_one_line(name)}, an earlier version, replaced"
    for name, variants in values["other_variants"].items():
        yield f"note: {on_one_line(name)} describes chunks of {', '.join(variants)}, which is not the current variant"
    if models := [name for name in written.num_captions if is_of_model(name)]:
        names = ", ".join(f"{source_name(name)}@*=1" for name in models)
        yield f"note: training uses captions of models only if --captions.sources names them, such as human=1,{names}"
    yield from (f"note: {on_one_line(note)}" for note in values["notes"])
    if values["num_dropped"]:
        yield "dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in values["num_dropped"].items())
    if reasons := values["num_rejected"]:
        yield from rejected_lines(
            reasons,
            rejected,
            num_files=num_files_rejected,
            num_captions_lost=values["num_captions_lost"],
            folder=written.folder,
        )
        if Reason.MISSING_CHUNK in reasons:
            yield f"  hint: {ADVICE[Reason.MISSING_CHUNK]}"
    yield f"manifest: {written.folder}"
