"""Run a compiled program on this rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from commfuse_fx.errors import CollectiveError, CommFuseError, VerificationError
from commfuse_fx.ir.dependence import Roots, written_nodes
from commfuse_fx.ir.functions import optimizer_step
from commfuse_fx.ir.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.program import Program, Source
from commfuse_fx.ir.random_draws import draws_random_numbers
from commfuse_fx.ir.update_layout import check_blocks
from commfuse_fx.runtime.execute.codegen import Generated, generate
from commfuse_fx.runtime.execute.codegen_of_halves import Halves
from commfuse_fx.runtime.execute.guard import Guard, finish_others
from commfuse_fx.runtime.execute.interrupts import interrupts_deferred
from commfuse_fx.runtime.execute.modes import outside_modes
from commfuse_fx.runtime.execute.recorded import LayoutCheck, as_recorded
from commfuse_fx.runtime.execute.socket_threads import give_way, share_a_core
from commfuse_fx.runtime.execute.tail import Tail
from commfuse_fx.runtime.execute.wire import Wire
from commfuse_fx.runtime.memory.flat_pool import FlatPool
from commfuse_fx.runtime.memory.shards import Shards
from commfuse_fx.runtime.memory.storage import Storage
from commfuse_fx.runtime.ranks.groups import Groups


class Executor:
    """One program, its generated code and its bound storage.

    A run is two calls. `produce` computes everything and changes nothing that the user owns; if it
    raises, the step has not happened. `commit` writes parameters, optimizer state and buffers. A program with
    nodes that belong into the following step leaves a tail behind; `synchronize` finishes it.

    `params` are the user's parameters, `values` what the graph works on: `shards` has the parts of those that the
    program divides among ranks, and is None where it divides none.
    """

    def __init__(
        self,
        program: Program,
        params: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        groups: Groups | None,
        rank: int,
        pool: FlatPool,
        shards: Shards | None = None,
    ) -> None:
        check_blocks(program, _refuse)
        self.program = program
        self.params = params
        self.shards = shards
        self.values = params if shards is None else shards.values
        self.buffers = buffers
        self.optimizer = optimizer
        self.rank = rank
        self.storage = Storage(program, self.values, optimizer if shards is None else shards.optimizer, pool, buffers)
        self.wire = Wire(program, groups, rank)
        self.has_collectives = any(True for _ in program.collectives())
        self.draws = any(draws_random_numbers(node) for node in program.graph.nodes)
        self.devices = sorted({p.device.index or 0 for p in params.values() if p.device.type == "cuda"})
        self._sources: Sequence[Source] = list(program.sources.values())
        self._relaid: list[tuple[int, TensorSpec]] | None = None  # places of inputs that lie otherwise than recorded
        self.generated: Generated | None = None
        self._check: LayoutCheck | None = None  # until the first run is over
        self.seed = 0
        """Where the next step's random numbers begin; the same on all ranks. Whoever runs the step sets it."""
        self.needs_seed = program.config.divides_graphs and (
            self.draws or any(source.kind == "seed" for source in program.sources.values())
        )
        self.guard = Guard(self.synchronize)
        self.tail = Tail((), self.guard)

    def prepare(self, on_backward: Callable[[], None], on_first_collective: Callable[[], None]) -> None:
        """Generate the code. The hooks run when the backward begins (or at once, if collectives come earlier)
        and just before the first collective."""
        self._check = LayoutCheck(self.program)
        self._generate(self._hooks(on_backward, on_first_collective), self._check)

    def _hooks(
        self, on_backward: Callable[[], None], on_first_collective: Callable[[], None]
    ) -> dict[fx.Node, list[Callable[[], None]]]:
        """What runs just before nodes."""
        hooks: dict[fx.Node, list[Callable[[], None]]] = {}
        if self.has_collectives:
            body = self._voted_for()
            first = next(node for node in body if info(node).sends or info(node).collective is not None)
            backward = next((node for node in body if info(node).phase == "backward"), first)
            before_first = body.index(backward) < body.index(first)
            hooks.setdefault(backward if before_first else body[0], []).append(on_backward)
            hooks.setdefault(first, []).append(on_first_collective)
        for node in dict.fromkeys(anchor for n in self.program.graph.nodes if (anchor := info(n).next_step)):
            hooks.setdefault(node, []).insert(0, self._tail_before(node))
        if self.has_collectives and not self.devices and share_a_core():
            for node in self.program.graph.nodes:
                if info(node).gives_way:
                    hooks.setdefault(node, []).append(give_way)
        return hooks

    def _voted_for(self) -> list[fx.Node]:
        """The calls that run between a vote and the next one."""
        return [node for node in self.program.graph.nodes if node.op == "call_function"]

    def _generate(self, hooks: Mapping[fx.Node, Sequence[Callable[[], None]]], check: LayoutCheck) -> None:
        self.generated = generate(self.program, self._bind, hooks, self.wire.sends(), check.functions)
        self.tail = Tail(self.generated.tail, self.guard)
        self._tail_hooks = self.tail.hooks()

    @property
    def _code(self) -> Generated | Halves:
        assert self.generated is not None
        return self.generated

    def _tail_before(self, node: fx.Node) -> Callable[[], None]:
        return lambda: self._tail_hooks[node]()

    def _bind(self, node: fx.Node) -> Any:
        if node.target is optimizer_step:
            return self.step_optimizer
        if info(node).kept:
            name, spec = info(node).name, tensor_spec(node)
            return lambda *args, **kwargs: self.storage.pool.memory(name, spec)
        return self.wire.bind(node) or node.target

    def run(self, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """Execute one step; returns the loss and the gradients (when the program has any)."""
        assert self.generated is not None
        if self.shards is not None and not self.has_collectives:
            self.shards.release()  # otherwise it waits until the ranks have agreed
        given = self.gather(inputs)
        with self._quietly(), self._own_randomness():
            try:
                live, left = self.generated.produce(given)
            except BaseException as error:
                self._leave(error)
                raise
            with interrupts_deferred():
                outputs = self.generated.commit(live)
                if self._check is not None:
                    self.generated = self.generated.without(self._check.needless())
                    self._check = None
                self.publish()
                if self.tail.parts:
                    with self.guard.lock:
                        self.tail.begin(left)
                        if not self.guard.is_closed:
                            self.guard.close(self.storage.tensors())
        return outputs

    def bind(self) -> None:
        """Take over parameters and optimizer state as they are now. Raises LayoutConflict; then nothing has changed."""
        if self.shards is not None:
            self.shards.take()
        self.storage.bind()

    def is_bound(self) -> bool:
        """Whether the last step's storage still serves; what the user has written into it is taken over."""
        if self.shards is not None:
            self.shards.take()
        return self.storage.is_bound()

    def publish(self) -> None:
        """After an update: show the user the optimizer's states."""
        if self.storage.publish() and self.shards is not None:
            self.shards.show()

    def synchronize(self) -> None:
        """Wait for the communication that the last step left on the wire, and finish its updates.

        Raises CollectiveError when that communication fails.
        """
        with self.guard.lock:
            try:
                if self.tail.is_pending:
                    with outside_modes():
                        self.tail.finish()
            finally:
                if not self.tail.is_pending:  # Ctrl-C may have come between
                    self.guard.open()

    @staticmethod
    @contextmanager
    def _quietly() -> Iterator[None]:
        """No gradients, no autocast, and guarded tensors are tensors like any other."""
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunctionSubclass():
            yield

    def _leave(self, error: BaseException) -> None:
        """The step has failed: finish what the step before left behind, and forget what this one has started."""
        self._locate(error)
        with self.guard.lock:
            try:
                self.tail.finish()
            except CollectiveError as lost:
                if sys.version_info >= (3, 11):
                    error.add_note(str(lost))
            self.guard.open()
        self.wire.abandon()
        self.storage.pool.forget_memory()

    def gather(self, inputs: Mapping[str, torch.Tensor]) -> list[Any]:
        """The value of every placeholder, in the order of the program's sources."""
        finish_others(self.values.values(), self.guard)
        numbers = self.storage.numbers()
        values: list[Any] = []
        for source in self._sources:
            if source.kind == "parameter":
                values.append(self.values[source.name])
            elif source.kind == "buffer":
                values.append(self.buffers[source.name])
            elif source.kind == "input":
                values.append(inputs[source.name])
            elif source.kind == "seed":
                values.append(self.seed)
            elif source.kind == "hyper":
                values.append(numbers[source.owner][source.name])
            else:
                values.append(self.storage.value(source))
        if self._relaid is None:  # strides of inputs are part of what a plan is for
            self._relaid = _otherwise(self.program, values)
        for place, spec in self._relaid:
            values[place] = as_recorded(values[place], spec)
        return values

    def step_optimizer(self, params: Sequence[nn.Parameter], grads: Sequence[torch.Tensor]) -> None:
        """Let the user's optimizer update, with `.grad` as it was before and after."""
        assert self.optimizer is not None
        held = [(param, param.grad) for group in self.optimizer.param_groups for param in group["params"]]
        for param, _ in held:
            param.grad = None
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        try:
            with torch.enable_grad():
                self.optimizer.step()
        finally:
            for param, grad in held:
                param.grad = grad

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Draw from a stream of this rank, which the user's seed decides: another mask on every step and rank."""
        if not self.draws or self.program.mesh.world == 1:
            yield
            return
        before = torch.get_rng_state()
        # 62 bits from the user's generator, so that the next step differs; the rank is mixed in, but for one device's
        # graph divided among ranks, where all of them draw the whole.
        if self.program.config.divides_graphs:
            seed, rank = self.seed, 0
        else:
            seed, rank = int(torch.randint(0, 1 << 62, (1,))), self.rank
        state = torch.get_rng_state()
        cuda = [torch.cuda.get_rng_state(device) for device in self.devices]
        try:
            torch.default_generator.manual_seed(seed_of_rank(seed, rank))
            for device in self.devices:
                torch.cuda.default_generators[device].manual_seed(seed ^ (rank + 1))
            yield
        except BaseException:
            state = before  # the step has not happened, whatever the ranks did before one of them raised
            raise
        finally:
            torch.set_rng_state(state)
            for device, saved in zip(self.devices, cuda, strict=True):
                torch.cuda.set_rng_state(saved, device)

    def _locate(self, error: BaseException) -> None:
        """Add the module and source line of the node that failed to the exception."""
        generated = self._code
        if isinstance(error, CommFuseError):
            return  # says where by itself
        traceback = error.__traceback__
        node = None
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == generated.filename:
                node = generated.node_of_line.get(traceback.tb_lineno)
            traceback = traceback.tb_next
        if node is not None and sys.version_info >= (3, 11):
            details = info(node)
            where = f" ({details.source})" if details.source else ""
            error.add_note(f"in {details.phase} of {details.module or 'the step'}: {details.name}{where}")


def _otherwise(program: Program, values: Sequence[Any]) -> list[tuple[int, TensorSpec]]:
    """Places and specs of the call's tensors whose strides are not the recorded ones: a divided graph takes a rank's
    part of the batch for contiguous. Those that the step writes to stay as they are."""
    roots = Roots(program.graph, program.aliases())
    written = dict.fromkeys(roots[value] for node in program.graph.nodes for value in written_nodes(node))
    return [
        (place, tensor_spec(node))
        for place, ((node, source), value) in enumerate(zip(program.sources.items(), values, strict=True))
        if source.kind == "input" and node not in written and as_recorded(value, info(node).spec) is not value
    ]


def _refuse(node: fx.Node, what: str) -> None:
    raise VerificationError(f"{info(node).name} {what}: a pass has made a wrong update")


def seed_of_rank(seed: int, rank: int) -> int:
    """The seed of a rank's own random stream, from a seed that all ranks share."""
    return (seed + rank * 0x9E3779B97F4A7C15) % (1 << 63)
