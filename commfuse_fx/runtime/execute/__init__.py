"""Runs a program: generated code, collectives on the wire, and what a step leaves to the next one."""
