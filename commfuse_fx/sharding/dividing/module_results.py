"""What modules compute and how it lies, noted while a graph is divided, for people who read the result."""

from __future__ import annotations

from torch import fx

from commfuse_fx.ir.core.meta import TensorSpec, info
from commfuse_fx.ir.core.placement import R
from commfuse_fx.ir.core.program import ModuleResult, Program
from commfuse_fx.ir.text.write_text import spec_text
from commfuse_fx.sharding.dividing.division import Division


class ModuleResults:
    """The last value of each module's forward that another module takes, and how it lies on each group of axes."""

    def __init__(self, program: Program) -> None:
        self._found: dict[str, tuple[str, TensorSpec]] = {}  # module -> name and spec of the node
        self._layouts: dict[str, list[str]] = {}
        for node in program.graph.nodes:
            spec, module = info(node).spec, info(node).module
            if _is_forward(node) and module and isinstance(spec, TensorSpec):
                if any(_is_forward(user) and info(user).module != module for user in node.users):
                    self._found.pop(module, None)
                    self._found[module] = info(node).name, spec

    def add(self, division: Division) -> None:
        """Note how they lie on the axes of a division that has been made."""
        lying = {info(node).name: node for node in division.values}
        for module, (name, _) in self._found.items():
            node = lying.get(name)
            if node is None:
                continue
            placement = next(iter(division.values[node].versions), R)
            layout = "own" if node in division.own else str(placement)
            self._layouts.setdefault(module, []).append(f"{division.axis.group}: {layout}")

    def finish(self, program: Program) -> None:
        program.module_results = [
            ModuleResult(module, spec_text(spec), spec.nbytes, "; ".join(self._layouts.get(module, ())))
            for module, (_, spec) in self._found.items()
        ]


def _is_forward(node: fx.Node) -> bool:
    return node.op == "call_function" and info(node).phase == "forward"
