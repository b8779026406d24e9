"""Modules that are imported when a name is missing that they make known.

A saved graph calls functions of rooms above the one that reads it. The package's root names a module that imports these
rooms, and the reader asks for it here, so that importing the package stays cheap and imports run downwards.

Why: docs/decisions.md, "Public names are imported when they are asked for".
"""

from __future__ import annotations

from importlib import import_module

_named: list[str] = []


def import_when_missed(module: str) -> None:
    """Name a module to import when something is missing."""
    _named.append(module)


def import_named() -> bool:
    """Import the modules that have been named. Returns whether there was any, the first time."""
    found, _named[:] = list(_named), []
    for module in found:
        import_module(module)
    return bool(found)
