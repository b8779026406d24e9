"""Tests of compiled graphs and of passes.

Assertions on collectives and budgets, what the fixture `graph_snapshot` gives, and programs from text.
"""

from commfuse_fx.ir.text.parse_text import parse_program
from commfuse_fx.testing.assertions import assert_collectives
from commfuse_fx.testing.budgets import assert_budget
from commfuse_fx.testing.pass_cases import assert_pass
from commfuse_fx.testing.snapshot import GraphSnapshot

__all__ = ["GraphSnapshot", "assert_budget", "assert_collectives", "assert_pass", "parse_program"]
