"""Cells, each one method in one setting: how they are run, where they lie, what they score."""
