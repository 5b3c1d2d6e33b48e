"""Videos that are made rather than found: for the demo, and for tests that must know which frame they got."""
