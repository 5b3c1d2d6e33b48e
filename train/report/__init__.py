"""Results page of a run, comparison page of several runs, and model card of an export."""
