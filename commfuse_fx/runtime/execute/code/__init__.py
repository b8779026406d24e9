"""The code of a program, and the records that it runs with."""
