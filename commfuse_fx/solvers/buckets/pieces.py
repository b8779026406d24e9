"""The sizes of pieces in which a bucket is sent while the rest of it is still computed.

Why: docs/decisions.md, "A large bucket leaves in pieces".
Why: docs/decisions.md, "Rows leave in pieces, on CPUs".
"""

PIECE = 8 * 2**20
"""Bytes from which a complete stretch is worth a message of its own."""

SMALL_PIECE = 2 * 2**20
"""The same where a cost model says that more messages are worth it, as the last one is waited for alone."""

FIRST_PIECE = 2**20
"""Bytes from which the first one of a step is: it ends the time in which the wire has nothing to carry."""

ROWS_PIECE = 2 * 2**20
"""Bytes of a piece that a rank gives to an all_gather, or gets from a reduce_scatter."""
