"""Numbers in, numbers out: where to cut buckets and in which order to send them."""
