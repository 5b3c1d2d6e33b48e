"""The networks, and the one door of attention."""
