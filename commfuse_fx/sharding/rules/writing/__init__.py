"""What sharding rules are written with."""
