"""Canonical text: how a program is written, and how it is read."""
