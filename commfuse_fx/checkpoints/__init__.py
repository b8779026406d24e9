"""Steps that are saved and loaded: files, shares of ranks, and the state in memory."""
