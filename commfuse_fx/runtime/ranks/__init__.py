"""Process groups, votes of ranks, failures, restarts and forks."""
