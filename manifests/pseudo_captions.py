"""Tables of captions that a model wrote: a Parquet file that `prep manifest captions` takes as a source of captions.

`train caption-chunks` and `prep captions` write them. The schema metadata has a JSON object under METADATA_KEY: `kind`,
`weights`, `weights_sha256` (null if unknown), `video_variant`, `settings`, and what else the writer knows. The source
of a caption is `<name>@<8 hexadecimal digits>`; captions with other digits replace it.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from clipmill.manifests.publish import publish_atomically

PSEUDO_CAPTIONS = "pseudo-captions"  # kind of the tables
METADATA_KEY = b"clipmill"
SCHEMA = pa.schema(
    [
        ("video", pa.string()),
        ("begin_s", pa.float64()),
        ("end_s", pa.float64()),
        ("text", pa.string()),
        ("source", pa.string()),
        ("likelihood", pa.float32()),
        ("sample", pa.int16()),  # number of the caption among those of its clip
    ]
)


def write_pseudo_captions(path: Path, tables: Iterable[pa.Table], *, record: Mapping[str, Any]) -> None:
    """Publish `tables` (SCHEMA), one row group or more for each, with the metadata `record`."""
    schema = SCHEMA.with_metadata({METADATA_KEY: json.dumps(record, sort_keys=True).encode()})
    with publish_atomically(path) as temporary, pq.ParquetWriter(temporary, schema, write_page_checksum=True) as writer:
        for rows in tables:
            writer.write_table(rows.replace_schema_metadata(schema.metadata))
