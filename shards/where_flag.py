"""Check `--where` while flags are parsed. `where.py` and DuckDB are loaded only if the flag is used."""


def check_where(where: str | None) -> None:
    """Raise a UserError if `where` is neither None nor a valid expression."""
    if where is not None:
        from clipmill.shards.where import parse_where  # slow to import

        parse_where(where)
