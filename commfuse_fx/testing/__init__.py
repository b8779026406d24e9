"""Tests of compiled graphs: assertions on collectives and budgets, and what the fixture `graph_snapshot` gives."""

from commfuse_fx.testing.assertions import assert_collectives
from commfuse_fx.testing.budgets import assert_budget
from commfuse_fx.testing.snapshot import GraphSnapshot

__all__ = ["GraphSnapshot", "assert_budget", "assert_collectives"]
