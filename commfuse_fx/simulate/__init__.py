"""A step played on a cluster: when each node runs, what is exposed, and the bound that no order beats."""
