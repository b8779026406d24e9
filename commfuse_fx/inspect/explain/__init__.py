"""What a compiled graph says of itself, in words, tables and pictures."""
