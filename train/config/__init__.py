"""Settings that tasks share, each with its meaning, unit, range and default; YAML files and presets."""
