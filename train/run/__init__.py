"""The folder of a run: settings, metrics, checkpoints, evaluations, and who else is sent its numbers."""
