"""Package that adds one part of each kind to clipmill; docs/plugins.md explains it."""
