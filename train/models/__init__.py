"""The networks, and the one interface to attention."""
