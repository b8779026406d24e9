"""Execution of a program: generated code, its collectives, and the updates that a step leaves to the next one."""
