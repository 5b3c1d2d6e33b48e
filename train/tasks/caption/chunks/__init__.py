"""Caption video files: split into windows, decoded once, captioned in batches, written as CSV, JSON or SRT."""
