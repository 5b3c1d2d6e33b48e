"""The networks, and the only interface to attention."""
