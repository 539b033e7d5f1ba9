"""Data sets as rows: files, folders, registries, the hub."""
