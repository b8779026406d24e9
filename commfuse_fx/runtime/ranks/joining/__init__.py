"""Which group of ranks this process is in, and how it has come there."""
