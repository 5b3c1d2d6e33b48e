"""What every layer needs of a device: copies that do not wait, precision, random numbers."""
