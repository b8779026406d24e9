"""Run all ranks of a world in one process, to debug and to check compiled steps."""
