"""Reading what was compiled. Nothing here changes a program."""
