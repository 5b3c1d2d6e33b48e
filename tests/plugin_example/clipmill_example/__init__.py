"""A package that adds a part of each kind to clipmill; docs/plugins.md explains it."""
