"""Run a compiled program on this rank."""

from __future__ import annotations

import linecache
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from commfuse_fx.errors import CollectiveError, CommFuseError, VerificationError
from commfuse_fx.ir.core.functions import optimizer_step
from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Program, Source
from commfuse_fx.ir.core.random_draws import draws_random_numbers
from commfuse_fx.ir.ops.fixed_values import FixedValues, held_values
from commfuse_fx.ir.updates.update_layout import check_blocks
from commfuse_fx.runtime.execute.code.codegen import Generated, Hooks, Sends, generate
from commfuse_fx.runtime.execute.code.generated_code import Code
from commfuse_fx.runtime.execute.code.learning_rates import LearningRates
from commfuse_fx.runtime.execute.code.recorded import LayoutCheck, as_recorded, laid_out_otherwise
from commfuse_fx.runtime.execute.code.views_of_memory import MemoryViews, TakenMemory, views_of_memory
from commfuse_fx.runtime.execute.code.vote_hooks import vote_hooks
from commfuse_fx.runtime.execute.code.whole_vectors import in_whole_vectors
from commfuse_fx.runtime.execute.inductor.inductor import compiled_regions
from commfuse_fx.runtime.execute.inductor.region_outputs import RegionCode
from commfuse_fx.runtime.execute.interrupts import interrupts_deferred
from commfuse_fx.runtime.execute.random_states import generators_of, stream_of_rank
from commfuse_fx.runtime.execute.tail import Tail
from commfuse_fx.runtime.execute.wire.socket_threads import give_way, share_a_core
from commfuse_fx.runtime.execute.wire.wire import Wire
from commfuse_fx.runtime.memory.flat_pool import FlatPool
from commfuse_fx.runtime.memory.guard import Guard, finish_others
from commfuse_fx.runtime.memory.held_gradients import HeldGradients, specs_of_held
from commfuse_fx.runtime.memory.modes import outside_modes
from commfuse_fx.runtime.memory.shards import Shards
from commfuse_fx.runtime.memory.storage import Storage
from commfuse_fx.runtime.ranks.groups import Groups
from commfuse_fx.runtime.ranks.seeds import draw_seed


class Executor:
    """An executor runs one program on one rank, with its generated code and its bound storage.

    A run makes two calls. `produce` computes all results and changes nothing that the user owns; if it raises, the step
    has not happened. `commit` writes parameters, optimizer states and buffers. If some nodes run in the following step,
    a run leaves them as a tail, which `synchronize` finishes.

    params: the user's parameters, by name.
    values: the tensors that the graph works on, by the same names.
    held: the gradients of earlier micro-batches.
    shards: the parts of the parameters that the program divides among ranks; None if it divides none.
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
        held: HeldGradients | None = None,
    ) -> None:
        check_blocks(program, _refuse)
        self.program = program
        self.params = params
        self.shards = shards
        self.values = params if shards is None else shards.values
        self.buffers = buffers
        self.optimizer = optimizer
        self.held = HeldGradients() if held is None else held
        self.rank = rank
        updated, states = (params, optimizer) if shards is None else (shards.updated, shards.optimizer)
        self.storage = Storage(program, updated, states, pool, buffers)
        self.wire = Wire(program, groups, rank)
        self.has_collectives = any(True for _ in program.collectives())
        self.votes = False  # until the code is there
        self.draws = any(draws_random_numbers(node) for node in program.graph.nodes)
        self.devices = sorted({p.device.index or 0 for p in params.values() if p.device.type == "cuda"})
        self._held_specs = specs_of_held(program, rank)
        self._sources: Sequence[Source] = list(program.sources.values())
        self._relaid: list[tuple[int, TensorSpec]] | None = None  # inputs with other strides than recorded
        self.generated: Generated | None = None
        self._views: dict[fx.Node, MemoryViews] = {}
        self._check: LayoutCheck | None = None  # until the first run is over
        self.seed = 0
        """The seed of the next step, the same on all ranks. The session sets it before each run."""
        allocations = [node for node in program.graph.nodes if node.target is torch.ops.aten.empty.memory_format]
        self.kept = [(info(node).name, tensor_spec(node)) for node in allocations]
        """The memory that the program may take from the pool."""
        self.needs_seed = program.config.divides_graphs and (
            self.draws or any(source.kind == "seed" for source in program.sources.values())
        )
        self.rates = LearningRates(program, [] if optimizer is None else optimizer.param_groups)
        self.guard = Guard(self.synchronize)
        self.tail = Tail((), self.guard, self.devices)

    def prepare(self, cast: Callable[[], None], settle: Callable[[], None], always: bool = False) -> None:
        """Generate the code. cast, settle, always: as `vote_hooks` takes them."""
        hooks, sends = self._hooks(cast, settle, always), self.wire.sends()
        self._views = views_of_memory(self.program, but=[*hooks, *sends])
        self._generate(hooks, sends)

    @cached_property
    def generators(self) -> list[torch.Generator]:
        """What a run may draw random numbers from."""
        return generators_of(self.program)

    @property
    def made_once(self) -> dict[fx.Node, None]:
        """The nodes that take no time in a step: views of memory that is there, and what is computed once."""
        views = (node for made in self._views.values() for node in (*made.own, *made.lent))
        return dict.fromkeys((*views, *(node for node in self.program.graph.nodes if info(node).once)))

    def _hooks(self, cast: Callable[[], None], settle: Callable[[], None], always: bool) -> Hooks:
        """The functions that run just before a node, by node."""
        hooks = vote_hooks(self.program, self._voted_for(), cast, settle, always)
        self.votes = bool(hooks)
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

    def _values_made_once(self) -> dict[fx.Node, Any]:
        """The values that the program computes once, as far as other nodes need them. Nobody writes to them."""
        held = held_values(self.program)
        fixed = FixedValues(self.program, finish=as_recorded) if held else None
        with outside_modes():
            return {node: fixed.of(node) for node in held} if fixed is not None else {}

    def _generate(self, hooks: Hooks, sends: Sends) -> None:
        self._check = check = LayoutCheck(self.program, self.program.graph.nodes)
        views, compiled, once = self._views_with_memory(), *self._computed_otherwise()
        self.generated = generate(
            self.program, self._bind_in_code, hooks, sends, check.functions, views, compiled, once
        )
        self._show_lines(self.generated.code)
        self.tail = Tail(self.generated.tail, self.guard, self.devices)
        self._tail_hooks = self.tail.hooks()

    def _views_with_memory(self) -> dict[fx.Node, list[fx.Node]]:
        return {memory: [*made.own, *made.lent] for memory, made in self._views.items()}

    def _computed_otherwise(self) -> tuple[dict[int, RegionCode], dict[fx.Node, Any]]:
        """What no statement computes: regions by Inductor, and values that are there."""
        return compiled_regions(self.program, self.rank), self._values_made_once()

    def _show_lines(self, code: Code) -> None:
        """Let tracebacks show the lines of generated code for as long as this executor lives."""
        weakref.finalize(self, linecache.cache.pop, code.filename, None).atexit = False

    @property
    def _codes(self) -> list[Code]:
        """What was generated."""
        return [] if self.generated is None else [self.generated.code]

    def _tail_before(self, node: fx.Node) -> Callable[[], None]:
        return lambda: self._tail_hooks[node]()

    def _bind_in_code(self, node: fx.Node) -> Any:
        if node in self._views:
            return TakenMemory(self.storage.pool, node, self._views[node])
        return self._bind(node)

    def _bind(self, node: fx.Node) -> Any:
        if node.target is optimizer_step:
            return self.step_optimizer
        if info(node).kept:
            name, spec = info(node).name, tensor_spec(node)
            return lambda *args, **kwargs: self.storage.pool.memory(name, spec)
        found, kernel = self.wire.bind(node), self.rates.kernels.get(node)
        return found or in_whole_vectors(self.program, node, kernel) or kernel or node.target

    def run(self, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """Run one step; returns the loss, the gradients and the auxiliary outputs of the program, in this order."""
        assert self.generated is not None
        if self.shards is not None and not self.votes:
            self.shards.release()  # else this happens after the vote
        given = self.gather(inputs)
        with self._quietly(), self._own_randomness():
            live, left = self._or_leave(self.generated.produce, given)
            with interrupts_deferred():
                outputs: tuple[Any, ...] = self._or_leave(self.generated.commit, live)
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

    def run_by(
        self, run: Callable[[Sequence[Any]], tuple[Any, ...]], inputs: Mapping[str, torch.Tensor]
    ) -> tuple[Any, ...]:
        """As `run`, by another function than the generated code. For programs without a tail.

        run: gets the values of the placeholders, and returns the outputs.
        """
        given = self.gather(inputs)
        with self.in_step():
            outputs: tuple[Any, ...] = self._or_leave(run, given)
            self.publish()
        return outputs

    def _or_leave(self, run: Callable[[Any], Any], given: Any) -> Any:
        """Run a part of a step. If it fails, nothing is left of it that others wait for."""
        try:
            return run(given)
        except BaseException as error:
            self._leave(error)
            raise

    @property
    def has_run(self) -> bool:
        """Whether a first run is over, which finds out what later runs need not do."""
        return self.generated is not None and self._check is None

    def compute(self, given: list[Any]) -> tuple[Any, ...]:
        """Run the code on the values of the placeholders, tail included, and return the outputs.

        Call it inside of `in_step`, when no tail is pending. If it raises, the step may be half done.
        """
        assert self.generated is not None
        try:
            live, left = self.generated.produce(given)
            outputs = self.generated.commit(live)
            for part in self.tail.parts:
                part.run(left)
            return outputs
        except BaseException as error:
            self._locate(error)
            self.wire.forget()
            raise

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """What surrounds the code of a run: the modes that it needs, and its stream of random numbers."""
        with self._quietly(), self._own_randomness():
            yield

    def bind(self) -> None:
        """Bind to the present parameters and optimizer states. Raises LayoutConflict; then nothing has changed."""
        if self.shards is not None:
            self.shards.take()
        self.storage.bind()

    def is_bound(self) -> bool:
        """Whether storage is still bound. Values that the user has written since the last step are taken over."""
        if self.shards is not None:
            self.shards.take()
        return self.storage.is_bound()

    def publish(self) -> None:
        """After an update, put new states into the user's optimizer."""
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
        """Turn off gradients and autocast, and let guarded tensors behave like ordinary ones."""
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunctionSubclass():
            yield

    def _leave(self, error: BaseException) -> None:
        """After a failure, finish the tail of the previous step, and forget collectives that this one has started."""
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
            elif source.kind == "gradient":
                name = source.name.removesuffix(".grad")
                values.append(self.held.of(name, self.params[name], self._held_specs[name]))
            elif source.kind == "hyper":
                number = numbers[source.owner][source.name]
                if isinstance(number, torch.Tensor) and not self.rates.takes(len(values), number):
                    number = float(number)
                values.append(number)
            else:
                values.append(self.storage.value(source))
        if self._relaid is None:  # once is enough: calls with other strides get another plan
            self._relaid = laid_out_otherwise(self.program, values)
        for place, spec in self._relaid:
            values[place] = as_recorded(values[place], spec)
        if self.rates.follows:
            self.synchronize()  # updates that are pending read their rates from the same memory
        self.rates.put_into(values)
        return values

    def step_optimizer(self, params: Sequence[nn.Parameter], grads: Sequence[torch.Tensor]) -> None:
        """Run the user's optimizer on these gradients. Afterwards every `.grad` is what it was before."""
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

    def _own_randomness(self) -> AbstractContextManager[None]:
        """Draw random numbers from a stream of this step and rank, which follows from the user's seed."""
        if not self.draws or self.program.mesh.world == 1:
            return nullcontext()
        if self.program.config.divides_graphs:  # ranks draw whole tensors, so all of them need the same stream
            return stream_of_rank(lambda: self.seed, 0, self.devices)
        return stream_of_rank(draw_seed, self.rank, self.devices)

    def _locate(self, error: BaseException) -> None:
        """Add the module and source line of the node that failed to the exception."""
        codes = {code.filename: code for code in self._codes}
        if isinstance(error, CommFuseError):
            return  # its message names the place
        traceback = error.__traceback__
        node = None
        while traceback is not None:
            if (code := codes.get(traceback.tb_frame.f_code.co_filename)) is not None:
                node = code.node_of_line.get(traceback.tb_lineno)
            traceback = traceback.tb_next
        if node is not None and sys.version_info >= (3, 11):
            details = info(node)
            where = f" ({details.source})" if details.source else ""
            error.add_note(f"in {details.phase} of {details.module or 'the step'}: {details.name}{where}")


def _refuse(node: fx.Node, what: str) -> None:
    raise VerificationError(f"{info(node).name} {what}: a pass has made a wrong update")
