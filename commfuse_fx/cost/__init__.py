"""What computing and communicating cost, and what a step will take: clusters, formulas, profiles, the simulator."""
