"""A step of one shape, recorded: what it takes for fixed, what is copied in, and what is copied out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commfuse_fx.ir.core.meta import TensorSpec, tensor_spec
from commfuse_fx.runtime.execute.cuda_graphs.capturable import is_moved_without_waiting
from commfuse_fx.runtime.execute.cuda_graphs.cuda_graph import Recorder
from commfuse_fx.runtime.execute.cuda_graphs.given_values import Change, GivenValues
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.interrupts import interrupts_deferred
from commfuse_fx.runtime.execute.random_states import RandomStates


class CapturedStep:
    """A captured step runs the program of an executor from a recording. The executor must have run it before.

    inputs: the tensors that batches are copied into, by name.
    replays: how often it has run.
    """

    def __init__(self, executor: Executor, recorder: Recorder) -> None:
        sources = [(node, source.name) for node, source in executor.program.sources.items() if source.kind == "input"]
        self.inputs = {name: tensor_spec(node).empty(recorder.device).zero_() for node, name in sources}
        self.replays = 0
        given = executor.gather(self.inputs)
        self._unwaited = {name for node, name in sources if is_moved_without_waiting(node)}
        self._given = GivenValues(executor.program, given)
        self._lost = executor.storage.pool.lost
        generators = executor.generators if executor.draws else []
        states = RandomStates(generators)
        try:
            with executor.storage.pool.lending_anew(), executor.in_step():
                self._recording = recorder.record(lambda: executor.compute(given), generators)
        finally:
            states.restore()  # a seed that was drawn for the recording is that of no step
        self._memory = executor.storage.pool.held()

    def __str__(self) -> str:
        return ", ".join(f"{name} {TensorSpec.of(tensor)}" for name, tensor in self.inputs.items()) or "none"

    def change(self, executor: Executor) -> Change | None:
        """What is no longer as it was recorded; None if the recording may run.

        Looks at the user's parameters and hyper-parameters, and takes over the present learning rate.
        """
        if executor.storage.pool.lost != self._lost:
            return Change("a step has failed, whose communication may still write to the gradients", is_number=False)
        return self._given.change(executor.gather(self.inputs))

    def run(self, executor: Executor, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """What `Executor.run` returns for these inputs: tensors that the caller may keep."""
        with executor.in_step():
            for name, fixed in self.inputs.items():
                fixed.copy_(inputs[name], non_blocking=name in self._unwaited)
            with interrupts_deferred():
                self._recording.replay()
                self.replays += 1
                executor.publish()
                return copies(self._recording.outputs)

    def close(self) -> None:
        """Free the recording's memory. The device must have finished with it."""
        self._recording.close()
        self.inputs.clear()
        self._memory.clear()


def copies(outputs: Sequence[Any]) -> tuple[Any, ...]:
    """The same values in memory of their own, in one kernel for many tensors of one dtype.

    A recording writes its results into the same memory each time, and nobody knows who still holds earlier ones.
    """
    tensors = [each for each in outputs if isinstance(each, torch.Tensor)]
    fresh = [torch.empty_like(each) for each in tensors]
    if len(fresh) == 1:
        fresh[0].copy_(tensors[0])
    elif fresh:
        torch._foreach_copy_(fresh, tensors)
    left = iter(fresh)
    return tuple(next(left) if isinstance(each, torch.Tensor) else each for each in outputs)
