"""The decoders compared by `benchmarks.decode`: one program each, which may use a separate Python environment."""
