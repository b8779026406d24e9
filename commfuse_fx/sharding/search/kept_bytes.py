"""How many tensors of the size of a parameter stay in memory between steps, or until its update."""

from __future__ import annotations

from commfuse_fx.config.parallel_optimizer import GRADIENTS, PARAMETERS, STATES
from commfuse_fx.ir.core.program import Program
from commfuse_fx.kernels.update_rules import RULES


def copies(program: Program, name: str, has_gradient: bool = True) -> int:
    """How many tensors of the size of a parameter stay, and are divided as it is: itself, its states, and its gradient
    where that is there.

    What the parallel optimizer divides anyway does not count.
    """
    level = level_of(program, name)
    found = int(level < PARAMETERS)
    if has_gradient and name in program.grads:
        found += int(level < GRADIENTS)
    if level < STATES:
        found += states_of(program, name)
    return found


def level_of(program: Program, name: str) -> int:
    """The level on which the parallel optimizer divides a parameter, as far as its size and its marks say; 0: not."""
    asked, param = program.config.parallel_optimizer, program.params[name]
    if asked is None or not param.parallel_optimizer or param.spec.nbytes < 1024 * asked.parallel_optimizer_threshold:
        return 0
    return asked.level


def states_of(program: Program, name: str) -> int:
    """Tensors of the parameter's size in the optimizer's state; an optimizer without a rule keeps them to itself."""
    optimizer = program.optimizer
    if optimizer is None or optimizer.rule not in RULES:
        return 0
    states = RULES[optimizer.rule].states
    return sum(len(states(dict(group.flags))) for group in optimizer.groups if name in group.params)
