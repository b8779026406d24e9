"""Updates that ranks share: which rows each of them has, and what is sent for them."""
