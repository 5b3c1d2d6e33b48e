"""The field of `brightness` that `--where` knows, in training too, which does not load the column."""

import pyarrow as pa

from clipmill.shards.column_fields import ColumnFields

FIELDS = ColumnFields(name="brightness", fields={"brightness_mean": pa.float64()})
