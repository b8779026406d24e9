"""Folders of files about one compile: written, found and read."""
