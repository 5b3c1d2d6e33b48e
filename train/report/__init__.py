"""Results pages of a run, and of several runs beside each other."""
