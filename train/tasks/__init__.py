"""The training tasks, each complete in one folder."""
