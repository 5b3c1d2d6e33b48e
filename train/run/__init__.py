"""The folder of a run: settings, metrics, checkpoints and evaluation results, and experiment tracking."""
