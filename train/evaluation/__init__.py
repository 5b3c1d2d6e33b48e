"""What a finished run is worth: protocols and their numbers."""
