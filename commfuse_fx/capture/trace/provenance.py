"""The origin of each traced op: module path, source line and phase.

A forward op gets the module that is running and the innermost source line outside of torch. A backward op gets those of
the forward op whose gradient it computes: autograd gives both the same sequence number.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_fx.capture.dynamo.graph_of_dynamo import locator_of
from commfuse_fx.capture.refusals.eager_collectives import is_eager_collective, refuse_eager_collective
from commfuse_fx.capture.refusals.python_numbers import PythonNumbers
from commfuse_fx.capture.refusals.saved_tensors import ChangesOfSaved, versions_of
from commfuse_fx.capture.torch_parts.emulate import Randomness
from commfuse_fx.capture.torch_parts.substitute import Attributes
from commfuse_fx.capture.trace.call_paths import CallPaths
from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.core.random_draws import call_draws
from commfuse_fx.support.user_lines import _location, is_user_file, user_line

_DEVICE = torch.ops.prim.device.default
_TORCH = os.path.dirname(torch.__file__) + os.sep


def innermost_function(traceback: TracebackType | None) -> str:
    """Name of torch's public function, below the user's own frames, in which an exception was raised."""
    found = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_file(code.co_filename):
            found = ""
        elif not found and code.co_filename.startswith(_TORCH + "nn"):
            found = code.co_name if code.co_name not in ("_wrapped_call_impl", "_call_impl", "inner") else ""
        traceback = traceback.tb_next
    return found


def _line_of_forward(module: nn.Module) -> str:
    code = getattr(type(module).forward, "__code__", None)
    return "" if code is None else _location(code.co_filename, code.co_firstlineno)


def _named(module: str) -> str:
    return module or "the top-level module"


@dataclass(frozen=True)
class Origin:
    """The origin of a traced op.

    phase: "forward" or "backward". module: its path.
    source: `file:line`; "" where the user's code is no file, as in `python -c`.
    event: a number of `CallPaths`, or -1. gradient: a number of `FunctionGradients`, or -1.
    known: whether module and source are those of a forward op. Autograd's own ops, such as accumulations, have none.
    """

    phase: str
    module: str
    source: str
    event: int = -1
    gradient: int = -1
    known: bool = True

    @property
    def place(self) -> str:
        """Where the op was called, for a message: `at file:line`, or else the module."""
        return f"at {self.source}" if self.source else f"in {_named(self.module)}"


ORIGIN = "commfuse_origin"


def origin_of(node: fx.Node) -> Origin:
    found: Origin = node.meta.get(ORIGIN, _NOWHERE)
    return found


_NOWHERE = Origin("forward", "", "", known=False)

_NO_FORWARD_OP = 1 << 63
"""Autograd nodes that accumulate into a leaf have sequence numbers from here on."""


def traced_graph() -> fx.Graph:
    """The graph that make_fx is building right now."""
    mode = get_proxy_mode()
    assert mode is not None, "not tracing"
    graph: fx.Graph = mode.tracer.graph
    return graph


def annotate_after(graph: fx.Graph, last: fx.Node, origin: Origin) -> None:
    """Give `origin` to all nodes that were added after `last`."""
    node = graph._root.prev
    while node is not last and node.op != "root":
        node.meta.setdefault(ORIGIN, origin)
        node = node.prev


class OriginRecorder(TorchDispatchMode):
    """Annotates every op with its origin while make_fx records the graph, and refuses ops that cannot be traced.

    turned: the nodes that give a tensor with a gradient another shape in place (`t_`), and whether it is a view.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(module): name for name, module in reversed(list(model.named_modules()))}
        self._stack: list[str] = [""]
        self._by_sequence: dict[int, Origin] = {}
        self._in_backward = False
        self._thread = threading.get_ident()
        self.calls = CallPaths()
        self.turned: dict[fx.Node, bool] = {}
        self.changes = ChangesOfSaved()
        self.random = Randomness()
        self.numbers = PythonNumbers(lambda: self._place(user_line(sys._getframe(2))))
        self.attributes = Attributes(model)
        self._locator = locator_of(model)

    @property
    def module(self) -> str:
        """Path of the module that is running."""
        return self._stack[-1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # torch asks several times per op
        if is_eager_collective(func):
            refuse_eager_collective(func)
        turned: FakeTensor | None = None
        if func._schema.is_mutable and args:
            if type(args[0]) is torch.Tensor:
                raise CaptureError(self.attributes.refusal(args[0]))  # the op would change a real tensor
            if torch.Tag.inplace_view in func.tags and args[0].requires_grad:
                turned = args[0]
        self.random.generators.check()
        origin = self._origin()
        graph = traced_graph()
        last = graph._root.prev
        versions = versions_of(args[0]) if func._schema.is_mutable and args else []
        if call_draws(func, args, kwargs or {}):
            out = self.random.draw(func, args, kwargs or {})
        else:
            out = func(*args, **(kwargs or {}))
        annotate_after(graph, last, origin)
        if func._schema.is_mutable and args:
            self.changes.note(func, args[0], versions, origin.place)
        if turned is not None:
            self.turned[graph._root.prev] = turned._is_view()
        return out

    def _origin(self) -> Origin:
        if self._in_backward:
            return self._backward_origin()
        sequence = torch.autograd._get_sequence_nr() - 1
        event = self.calls.forward(sys._getframe(2), sequence)
        place = None if self._locator is None else self._locator.find(sys._getframe(2))
        origin = Origin("forward", *(place or (self._stack[-1], user_line(sys._getframe(2)))), event)
        # An op that makes no autograd node has the number of the op before it.
        self._by_sequence.setdefault(sequence, origin)
        return origin

    def source_of(self, sequence: int) -> str:
        """The line of the forward op with this number of autograd; "" if it is not known."""
        return self._by_sequence.get(sequence, _NOWHERE).source

    def _backward_origin(self) -> Origin:
        current = torch._C._current_autograd_node()
        sequence = current._sequence_nr() if current is not None else _NO_FORWARD_OP
        if sequence >= _NO_FORWARD_OP:
            return Origin("backward", "", "", self.calls.backward(None, ""), known=False)
        event = self.calls.backward(sequence, current.name())
        forward = self._by_sequence.get(sequence, _NOWHERE)
        return replace(forward, phase="backward", event=event)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Follow which module is running, and record."""
        before = nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        try:
            with self.numbers.watched(), self:
                yield
                self.random.generators.check()
        finally:
            self.calls.release()
            before.remove()
            after.remove()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Inside the `with` block, ops get this name as their module, such as that of the loss function."""
        self._stack.append(name)
        yield
        self._stack.pop()

    @contextmanager
    def backward(self) -> Iterator[None]:
        self._in_backward = True
        yield
        self._in_backward = False

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return  # global hooks run in all threads
        self._stack.append(self._names.get(id(module), self._stack[-1]))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # After an exception the stack is kept, so that the error can name the module.
        if sys.exc_info()[0] is None and threading.get_ident() == self._thread:
            self.random.generators.check()
            self.numbers.check(self._place(_line_of_forward(module)))
            self._stack.pop()

    def _place(self, line: str) -> str:
        return f"in {_named(self.module)}{f' at {line}' if line else ''}"
