"""Regions of a program that Inductor compiles."""
