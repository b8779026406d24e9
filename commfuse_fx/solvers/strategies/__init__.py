"""The cheapest choice of a state for each of many variables."""
