"""Results pages: of a run, and of several runs next to each other."""
