"""Simulated steps as Chrome traces, which Perfetto opens."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

from commfuse_fx.simulate.simulation import simulate
from tests.simulate.test_simulation import bucket_in_pieces, deferred, handing_over


def test_chrome_trace(tmp_path: object) -> None:
    s = simulate(bucket_in_pieces()[0], bucket_in_pieces()[1])
    data = json.loads(s.chrome_trace())
    found = data["traceEvents"]
    lanes = {each["tid"]: each["args"]["name"] for each in found if each["name"] == "thread_name"}
    assert lanes == {0: "compute", 1: "communication on dp"}
    slices = [each for each in found if each["ph"] == "X"]
    assert all(each["dur"] >= 0 and each["ts"] >= 0 for each in slices)
    wire = {each["name"]: (each["ts"], each["dur"]) for each in slices if each["tid"] == 1}
    assert wire == {"bucket.0": (1e6, 2.5e6), "bucket.1": (4e6, 2.5e6)}
    assert {each["name"]: each["ts"] for each in slices if each["cat"] == "wait"} == {"wait for bucket": 4e6}
    for serial in {each["id"] for each in found if each.get("cat") == "flow"}:
        arrow = {each["ph"]: each for each in found if each.get("id") == serial}
        assert arrow.keys() == {"s", "t", "f"}
        assert arrow["s"]["ts"] <= arrow["t"]["ts"] and arrow["s"]["tid"] == arrow["f"]["tid"] == 0
        assert arrow["f"]["ts"] == 4e6


def test_a_trace_has_the_time_of_handing_over() -> None:
    program, model = bucket_in_pieces()
    found = json.loads(simulate(program, replace(model, cluster=handing_over(0.25))).chrome_trace())["traceEvents"]
    busy = sorted((each["ts"], each["dur"], each["name"]) for each in found if each["ph"] == "X" and each["tid"] == 0)
    assert [(begin, seconds) for begin, seconds, name in busy if name.startswith("issue ")] == [
        (1e6, 0.25e6),
        (4.25e6, 0.25e6),
    ]
    assert all(begin + seconds == after for (begin, seconds, _), (after, _, _) in pairwise(busy)), "without a gap"
    arrows = [each["ts"] for each in found if each["ph"] == "s"]
    assert arrows == [1e6, 4.25e6], "from the beginning of what hands it over"


def test_a_trace_of_reaching_steps_begins_at_zero(tmp_path: object) -> None:
    program, model = deferred()
    path = simulate(program, model).save_chrome_trace(f"{tmp_path}/step.json")
    times = [each["ts"] for each in json.loads(path.read_text())["traceEvents"] if "ts" in each]
    assert min(times) == 0
