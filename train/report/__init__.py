"""Pages: the results of a run, and several runs beside one another."""
