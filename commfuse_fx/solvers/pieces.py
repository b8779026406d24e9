"""The sizes of pieces in which a bucket is sent while the rest of it is still computed, where no cost model decides."""

PIECE = 8 * 2**20
"""Bytes from which a complete stretch is worth a message of its own."""

FIRST_PIECE = 2**20
"""Bytes from which the first one of a step is: it ends the time in which the wire has nothing to carry."""

ROWS_PIECE = 2 * 2**20
"""Bytes of a piece that a rank gives to an all_gather, or gets from a reduce_scatter."""
