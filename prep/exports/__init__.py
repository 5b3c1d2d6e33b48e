"""Export of columns to the formats of other tools."""
