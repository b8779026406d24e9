"""Measures collectives and steps on real ranks, for cluster files and profiles."""
