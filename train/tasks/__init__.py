"""The tasks, each whole in one folder."""
