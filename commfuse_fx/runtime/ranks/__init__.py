"""What ranks do together: process groups, votes, failures, restarts and forks."""
