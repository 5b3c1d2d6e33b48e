"""Queries of latents in tests."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from clipmill.train.data.latents.segments import SegmentQuery
from clipmill.train.data.loader import LoaderSettings

_OF_LOADING = {field.name for field in fields(LoaderSettings)}


def segments(data_dir: Path, **settings: Any) -> SegmentQuery:
    """Make a query from these settings; the settings of `LoaderSettings` become its `loading`."""
    loading = {name: value for name, value in settings.items() if name in _OF_LOADING}
    query_settings = {name: value for name, value in settings.items() if name not in _OF_LOADING}
    return SegmentQuery(data_dir, **query_settings, loading=LoaderSettings(**loading))
