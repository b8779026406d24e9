"""`commfuse opt`: passes of choice over a saved graph."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

import commfuse_fx as cf
import commfuse_fx.passes
from commfuse_fx.cli import main
from commfuse_fx.errors import CommFuseError
from commfuse_fx.ir.json.read import from_json
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.passes.declaration import Situation
from commfuse_fx.passes.rewrite.simplify import Simplify
from commfuse_fx.planning.pipeline.pass_text import parse_passes
from commfuse_fx.planning.pipeline.pass_values import default_text, hint_of
from commfuse_fx.planning.pipeline.recipe import build_pipeline
from commfuse_fx.planning.pipeline.registry import PASSES
from tests.inspect.steps import Net, train

BEGIN = "simplify,lower_user_collectives,reduce_gradients,update_parameters,compute_once,gradients_first"
CUT = '{"allreduce": {"mode": "index", "config": [2, 6]}}'


@pytest.fixture(scope="module")
def lowered() -> cf.Lowered:
    return train(Net())


@pytest.fixture(scope="module")
def dump(lowered: cf.Lowered, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of rank 0 of a dump."""
    return lowered.dump(tmp_path_factory.mktemp("opt"))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["opt", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_without_passes_it_is_the_compile_again(
    lowered: cf.Lowered, dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (dump, dump.parent, dump / "captured.json"):
        assert run(capsys, source, "--verify") == (0, lowered.text(), "")
    assert run(capsys, dump, "--json") == (0, lowered.to_json(), "")


def test_any_stage_can_be_made_and_gone_on_from(
    lowered: cf.Lowered, dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, _ = run(capsys, dump, "--passes", BEGIN)
    assert (code, text) == (0, lowered.stages["gradients_first"].text())
    reduced = tmp_path / "reduced.json"
    reduced.write_text(run(capsys, dump, "--passes", BEGIN, "--json")[1])
    rest = "fuse_collectives,flatten_storage,split_updates,lower_average,overlap,keep_gradients,reinplace"
    code, text, _ = run(capsys, reduced, "--passes", rest, "--after", BEGIN, "--verify", "--comm-fusion", CUT)
    other = train(Net(), json.loads(CUT)).text().splitlines()
    assert code == 0
    assert text.splitlines() == other


def test_options_that_are_not_given_are_those_of_the_compile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summed = train(Net(2), gradients_mean=False)
    folder = summed.dump(tmp_path)
    text = summed.stages["reduce_gradients"].text()
    passes = "simplify,slice_full_batch,lower_user_collectives,reduce_gradients"
    assert run(capsys, folder, "--passes", passes) == (0, text, "")
    bare = tmp_path / "bare.json"  # without the pipeline: as the configuration says
    bare.write_text(
        json.dumps({k: v for k, v in json.loads((folder / "captured.json").read_text()).items() if k != "pipeline"})
    )
    assert run(capsys, bare, "--passes", passes) == (0, text, "")
    averaged = run(capsys, folder, "--passes", f"{passes}(mean=true)")[1]
    assert averaged == text.replace(", sum, dp)", ", avg, dp)").replace(" op=sum ", " op=avg ")
    code, _, error = run(capsys, bare)
    assert code == 2 and "does not say which passes the compile ran; give --passes" in error


def test_a_cluster_prices_the_plan(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = "tile_first_gradient,split_updates,lower_average,schedule,keep_gradients,reinplace"
    passes = f"{BEGIN},fuse_collectives,flatten_storage,{planned}"
    code, _, error = run(capsys, dump, "--passes", passes)
    assert code == 2 and "was compiled without a cluster; give one with --cluster" in error
    code, text, _ = run(capsys, dump, "--passes", passes, "--cluster", "gloo-1gbit")
    assert code == 0 and text == train(Net(), cluster="gloo-1gbit").text()
    code, _, error = run(capsys, dump, "--passes", passes, "--cluster", "nowhere")
    assert code == 2 and "--cluster" in error and "nowhere" in error


def test_marks_come_with_the_captured_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net(2)
    cf.shard(model.layers[0], weight=("tp", None))  # type: ignore[index]
    divided = train(model, parallel_mode="semi_auto", mesh=(1, 2))
    folder = divided.dump(tmp_path)
    assert run(capsys, folder) == (0, divided.text(), "")
    passes = "simplify,range_lookups,counter_random,divide"
    assert run(capsys, folder, "--passes", passes) == (0, divided.stages["divide"].text(), "")
    code, _, error = run(capsys, folder / "graph.json", "--passes", "divide")
    assert code == 2 and "needs the marks of the model, which only the captured.json of a dump has" in error


def test_texts_after_passes(lowered: cf.Lowered, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, error = run(capsys, dump, "--passes", BEGIN, "--print", "after-all")
    stages = {name: lowered.stages[name] for name in BEGIN.split(",")}
    parts = [
        f"### after {name}: {'changed' if stage.modified else 'unchanged'}\n{stage.text()}"
        for name, stage in stages.items()
    ]
    assert error == "".join(parts) and out == lowered.stages["gradients_first"].text()
    error = run(capsys, dump, "--passes", BEGIN, "--print", "after-changed")[2]
    assert error == "".join(part for part in parts if ": changed\n" in part)
    assert "### after lower_user_collectives" not in error


def test_the_final_graph_of_a_dump_is_known_to_be_final(
    lowered: cf.Lowered, dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, dump / "graph.json", "--passes", "overlap,reinplace")[0] == 0
    alone = tmp_path / "graph.json"
    alone.write_text(lowered.to_json())
    code, _, error = run(capsys, alone, "--passes", "overlap")
    assert code == 2 and "overlap requires averaged" in error and "name it in --after if it has run" in error
    code, text, _ = run(capsys, alone, "--passes", "overlap", "--after", "lower_average", "--json")
    assert code == 0 and canonical_text(from_json(text)).count("\n") == lowered.text().count("\n")


@pytest.mark.parametrize(
    "passes, message",
    [
        ("nope", "there is no pass 'nope'; use one of simplify"),
        ("simplify(x=1)", "pass simplify has no option 'x'; it has no options"),
        ("reduce_gradients(means=true)", "no option 'means'; it has group, mean, fp32, honour_layerwise"),
        ("reduce_gradients(mean=3)", "option mean is 3; give True or False"),
        ("reduce_gradients(group=tp)", "option group is 'tp'; the axes of this mesh are dp"),
        ("keep_gradients(at_least=-1)", "option at_least is -1; give an int >= 0"),
        ("keep_gradients(at_least=many)", "option at_least is 'many'; give an int"),
        ("fuse_collectives(fusion=25)", "has no option 'fusion'; it has mib, across_steps"),
        ("postpone_gradients(part=-1)", "option part is -1; give a number >= 0"),
        ("overlap", "pass overlap requires averaged"),
        ("simplify(", "')' is missing"),
        ("simplify)", "closes no bracket"),
        ("simplify(x)", "'x' is no option; write option=value"),
        ("simplify(x=)", "has no value"),
        ("simplify(x=1,x=2)", "option x is given twice"),
        ('simplify(x={"a)', "is missing"),
        ("simplify(x={a})", "is no JSON"),
        ("a-b", "'a-b' is no pass"),
        ("", "--passes is empty"),
        ("simplify,,simplify", "'' is no pass"),
    ],
)
def test_bad_passes(passes: str, message: str, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys, dump, "--passes", passes)
    assert (code, out) == (2, "") and message in error and "\n" not in error.rstrip("\n")


def test_bad_files(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "graph.json").write_text((dump / "graph.json").read_text()[:-40])
    for file, message in (
        (tmp_path / "graph.json", "not JSON"),
        (dump / "graph.txt", "not JSON"),
        (tmp_path / "none", "there is no file"),
    ):
        code, out, error = run(capsys, file)
        assert (code, out) == (2, "") and message in error and str(file) in error
    assert "opt needs a FILE" in run(capsys)[2]


def test_a_pass_that_fails(dump: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Simplify, program: object) -> bool:
        raise CommFuseError("no way")

    monkeypatch.setattr(Simplify, "__call__", fail)
    code, out, error = run(capsys, dump, "--print", "after-all")
    assert (code, out) == (1, "") and error.startswith("### simplify failed\n") and "no way" in error


def test_values_of_options() -> None:
    written = parse_passes('a, b(x=1, y=[u, v.w],\n z={"k": [1, "),("]}) ,c(t=True,n=none,w=dp,s="a,b",e=[])')
    assert written == [
        ("a", {}),
        ("b", {"x": 1, "y": ["u", "v.w"], "z": {"k": [1, "),("]}}),
        ("c", {"t": True, "n": None, "w": "dp", "s": "a,b", "e": []}),
    ]


def test_every_pass_and_every_option_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    _, listed, _ = run(capsys, "--list")
    for entry in PASSES.values():
        assert [option.name for option in entry.options] == [field.name for field in fields(entry.make)]  # type: ignore[arg-type]
        part = listed[f"\n{listed}".index(f"\n{entry.name}\n") :].split("\n\n")[0]
        assert entry.purpose and entry.purpose in part and f"stage: {entry.stage}" in part
        for option in entry.options:
            assert f"option {option.name}: {hint_of(option)} (default: " in part and default_text(option) in part
        for fact in (*entry.requires, *entry.ensures):
            assert fact in part


def test_the_registry_is_in_the_order_of_a_compile(lowered: cf.Lowered) -> None:
    order = list(PASSES)
    config = lowered.program.config
    places = [order.index(item.name) for item in build_pipeline(Situation(config, lowered.program.mesh)).passes]
    assert places == sorted(places)
