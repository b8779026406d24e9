"""Code without a file (`python -c`, stdin, some notebooks) compiles as code in a file, without source lines."""

from __future__ import annotations

import _thread
import json
from queue import SimpleQueue
from typing import Any

import commfuse_fx as cf

SOURCE = """
import torch
import commfuse_fx as cf

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        return self.last(y + y.relu() * y)

class Offset(Model):
    def forward(self, x):
        return super().forward(x) + x.storage_offset()

class Unfolded(Model):
    def forward(self, x):
        y = super().forward(x)
        y.unfold(1, 2, 1).mul_(2)
        return y

def lowered(model):
    def loss(output, target):
        return ((output - target) ** 2).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, loss_fn=loss, optimizer=optimizer, device_num=2, global_rank=0)
    return step.lower(torch.randn(2, 4), torch.randn(2, 4))

def run(call, queue):
    try:
        queue.put(eval(call))
    except Exception as error:
        queue.put(error)
"""


def result(call: str, filename: str) -> Any:
    """What a call of the source gives: its value or its error. It runs in a thread without a frame of this file."""
    names: dict[str, Any] = {"__name__": "code"}
    exec(compile(SOURCE, filename, "exec"), names)
    queue: SimpleQueue[Any] = SimpleQueue()
    _thread.start_new_thread(names["run"], (call, queue))
    return queue.get()


def _without_lines(text: str) -> Any:
    return json.loads(text, object_hook=lambda record: {key: record[key] for key in record if key != "line"})


def test_texts_are_those_of_code_in_a_file() -> None:
    one, other = (result("lowered(Model())", name) for name in ("/code/model.py", "<string>"))
    assert '"line": "model.py:' in one.to_json() and '"line"' not in other.to_json()
    assert "%loss_fn/grad.ones_like.0" in other.text()
    for stage in one.stages:
        assert one.stages[stage].text() == other.stages[stage].text(), stage
    assert one.fingerprint == other.fingerprint
    assert _without_lines(one.to_json()) == _without_lines(other.to_json())


def test_reading_where_memory_begins_is_refused() -> None:
    for name in ("/code/model.py", "<string>"):
        error = result("lowered(Offset())", name)
        assert isinstance(error, cf.CaptureError) and "storage_offset()" in str(error)


def test_an_error_without_a_line_names_the_module() -> None:
    one, other = (result("lowered(Unfolded())", name) for name in ("/code/model.py", "<string>"))
    assert str(one).startswith("at /code/model.py:22: aten.mul_.Tensor changes memory through a view")
    assert str(other) == str(one).replace("at /code/model.py:22", "in the top-level module")
