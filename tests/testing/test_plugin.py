"""The pytest plugin: goldens, their outcomes, and when they may be written. Tests of tests, in folders of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import commfuse_fx as cf
from commfuse_fx.testing.goldens import compare, golden_path, read_golden, write_golden
from tests.testing.graphs import lowered, lowered_module

ROOT = Path(__file__).resolve().parent.parent.parent

ONE = """
    import os
    from tests.testing.graphs import lowered

    def test_step(graph_snapshot):
        graph_snapshot.check(lowered(int(os.environ.get("FEATURES", "4"))))
"""
UPDATE_ONE = ("--graph-update", "test_graph.py::test_step")
GOLDEN = "__graphs__/test_graph.test_step.graph"


class Project:
    """A folder with tests that use the fixture."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.golden = pytester.path / GOLDEN

    def run(self, *arguments: str) -> pytest.RunResult:
        return self.pytester.runpytest_inprocess("-p", "pytest_commfuse", "-p", "no:cacheprovider", *arguments)

    def outcome(self, *arguments: str, **outcomes: int) -> str:
        """What a run prints, after a check of how its tests ended."""
        result = self.run(*arguments)
        result.assert_outcomes(**outcomes)
        return result.stdout.str()

    def made(self) -> str:
        """The text of the golden of `test_step`, which is made."""
        self.outcome(*UPDATE_ONE, passed=1)
        return self.golden.read_text()

    def goldens(self) -> list[str]:
        return sorted(path.name for path in self.pytester.path.glob("**/__graphs__/*"))


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """pytester forgets what is imported while it is there, and parts of torch cannot be imported twice."""
    for features in (4, 5):
        lowered(features).text()
        lowered_module(features).text()


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("FEATURES", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The plugin is named, installed or not; and others take a second to import in every run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_graph=ONE)
    return Project(pytester)


def test_importing_the_plugin_imports_neither_torch_nor_the_package() -> None:
    script = (
        "import sys, pytest_commfuse\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'commfuse_fx', 'networkx')])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, text=True, capture_output=True, check=True)
    assert done.stdout == "[]\n"


def test_a_run_without_the_fixture_imports_neither_torch_nor_the_package(project: Project) -> None:
    project.pytester.makepyfile(
        test_plain="""
        import sys

        def test_plain():
            assert "torch" not in sys.modules
            assert "commfuse_fx" not in sys.modules
        """
    )
    result = project.pytester.runpytest_subprocess("-p", "pytest_commfuse", "test_plain.py")
    result.assert_outcomes(passed=1)


def test_a_missing_golden_fails_and_says_how_to_make_it(project: Project) -> None:
    text = project.outcome(failed=1)
    assert f"there is no golden {GOLDEN}; make it: pytest --graph-update test_graph.py::test_step\n" in text
    assert project.goldens() == []


def test_a_golden_is_made_and_then_holds(project: Project) -> None:
    text = project.outcome(*UPDATE_ONE, passed=1)
    assert f"=\n{GOLDEN}\n" in text.partition(" goldens written =")[2]
    assert project.golden.read_text().startswith("# schema: 1\n# torch: ")
    assert project.goldens() == [project.golden.name]  # and nothing unfinished
    assert "goldens written" not in project.outcome(passed=1)


def test_update_leaves_goldens_that_hold_alone(project: Project) -> None:
    project.made()
    os.utime(project.golden, ns=(1, 1))
    assert "goldens written" not in project.outcome(*UPDATE_ONE, passed=1)
    assert project.golden.stat().st_mtime_ns == 1


def test_a_difference_fails_with_the_graphs_first_and_then_the_lines(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = project.made()
    monkeypatch.setenv("FEATURES", "5")
    text = project.outcome(failed=1)
    (line, *_) = cf.diff(golden, lowered(5).text()).text().splitlines()
    title = text.index(f"the graph differs from its golden {GOLDEN}\n{line}\n")
    assert "torch.__trace" not in text
    assert line.startswith("compute changed: ")
    lines = text.index("--- golden\n+++ this graph\n")
    assert title < lines < text.index("if that is meant, make the golden again: pytest --graph-update test_graph.py::")
    assert "-in  %weight: f32[2,4] = parameter\n" in text
    assert "+in  %weight: f32[2,5] = parameter\n" in text
    assert project.golden.read_text() == golden
    project.outcome(*UPDATE_ONE, passed=1)
    assert "f32[2,5] = parameter" in project.golden.read_text()


def test_a_module_has_goldens_as_a_step_has(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.pytester.makepyfile(test_graph=ONE.replace("lowered", "lowered_module"))
    golden = project.made()
    assert "# form: module\n" in golden and " = hand_over([" in golden
    project.outcome(passed=1)
    monkeypatch.setenv("FEATURES", "5")
    text = project.outcome(failed=1)
    (line, *_) = cf.diff(golden, lowered_module(5).text()).text().splitlines()
    assert f"the graph differs from its golden {GOLDEN}\n{line}\n" in text


def test_update_writes_only_what_is_named(project: Project) -> None:
    project.pytester.makepyfile(test_other=ONE)
    project.outcome("--graph-update", "test_other.py", passed=1)
    assert project.goldens() == ["test_other.test_step.graph"]
    project.outcome(passed=1, failed=1)


@pytest.mark.parametrize("value", ["true", "1", "woodpecker", " TRUE "])
def test_update_is_refused_in_ci(project: Project, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CI", value)
    result = project.run(*UPDATE_ONE)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --graph-update is refused where CI is set (CI=*): goldens are made and *"])
    assert project.goldens() == []
    project.outcome(failed=1)  # without the option tests run, and say what is missing


@pytest.mark.parametrize("value", ["", "0", "false", "False"])
def test_update_goes_ahead_where_ci_is_off(project: Project, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CI", value)
    project.made()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--graph-update without tests; name the tests whose goldens are to be written, such as: pytest --graph"),
        (("-k", "step"), "--graph-update without tests; name the tests"),
        (("folder",), "--graph-update with folder, which is no test file and no test; name the tests"),
        (("test_graph.py", "."), "--graph-update with ., which is no test file and no test; name the tests"),
    ],
    ids=["nothing", "-k", "a folder", "a file and all"],
)
def test_update_wants_tests_named(project: Project, arguments: tuple[str, ...], message: str) -> None:
    project.pytester.mkdir("folder")
    result = project.run("--graph-update", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()
    assert project.goldens() == []


def of_torch(text: str, version: str) -> str:
    first, _, rest = text.partition("\n# torch: ")
    return f"{first}\n# torch: {version}\n{rest.partition(chr(10))[2]}"


def test_a_golden_of_another_torch_is_its_own_outcome(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = project.made()
    project.golden.write_text(of_torch(golden, "1.0.0"))
    mine = golden.splitlines()[1].removeprefix("# torch: ")
    title = f"the golden {GOLDEN} is of another torch: it was made with torch 1.0.0, this is torch {mine}\n"

    text = project.outcome(failed=1)
    assert f"{title}Apart from that the graph is the same\n" in text
    assert "make the golden again with this torch: pytest --graph-update test_graph.py::test_step\n" in text
    assert "--- golden" not in text

    compared = ("-o", "graph_snapshot_other_torch=compare")
    project.outcome(*compared, passed=1)
    assert "goldens written" not in project.outcome(*compared, *UPDATE_ONE, passed=1)
    skipped = project.outcome("-rs", "-o", "graph_snapshot_other_torch=skip", skipped=1)
    assert f"{title.rstrip()}; the graph is the same" in skipped

    monkeypatch.setenv("FEATURES", "5")
    for options in ((), compared):
        text = project.outcome(*options, failed=1)
        assert f"{title}The graph differs too\n" in text
        assert "+in  %weight: f32[2,5] = parameter\n" in text
        assert "-# torch" not in text
    assert "; the graph differs too" in project.outcome("-rs", "-o", "graph_snapshot_other_torch=skip", skipped=1)
    project.outcome(*UPDATE_ONE, passed=1)
    project.outcome(passed=1)


def test_an_unknown_choice_for_other_torch_is_refused(project: Project) -> None:
    result = project.run("-o", "graph_snapshot_other_torch=ignore")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    message = 'graph_snapshot_other_torch is \'ignore\'; use one of "fail", "skip", "compare"'
    assert message in result.stderr.str()


def test_a_golden_that_is_no_graph_fails_and_can_be_written(project: Project) -> None:
    project.made()
    project.golden.write_bytes(b"<<<<<<< \xff merge\n")
    text = project.outcome(failed=1)
    assert f"the graph differs from its golden {GOLDEN}\n" in text
    assert "no comparison of graphs, only of lines: " in text
    assert "-<<<<<<< \N{REPLACEMENT CHARACTER} merge\n" in text
    project.outcome(*UPDATE_ONE, passed=1)
    project.outcome(passed=1)


MANY = """
    import pytest
    from tests.testing.graphs import lowered

    GRAPH = lowered()

    class TestLayers:
        @pytest.mark.parametrize("layout", ["dp=2", "a/b", "a:b"])
        def test_step(self, graph_snapshot, layout):
            graph_snapshot.check(GRAPH)

    def test_two(graph_snapshot):
        graph_snapshot.check(GRAPH, name="train")
        graph_snapshot.check(GRAPH, name="eval.2")
        graph_snapshot.check(GRAPH)

    @pytest.mark.parametrize("name", [None, "x"])
    def test_twice(graph_snapshot, name):
        graph_snapshot.check(GRAPH, name=name)
        graph_snapshot.check(GRAPH, name=name)

    @pytest.mark.parametrize("name", ["", "../up", ".x", 3])
    def test_bad_name(graph_snapshot, name):
        graph_snapshot.check(GRAPH, name=name)

    def test_bad_graph(graph_snapshot):
        graph_snapshot.check("a text")
"""


def test_names_of_goldens_and_errors_of_names(project: Project) -> None:
    project.pytester.makepyfile(test_graph=MANY)
    text = project.outcome("--graph-update", "test_graph.py", passed=4, failed=7)
    goldens = project.goldens()
    for name in (
        "test_graph.TestLayers.test_step-dp=2.graph",
        "test_graph.test_two.graph",
        "test_graph.test_two@eval.2.graph",
        "test_graph.test_two@train.graph",
        "test_graph.test_twice-None.graph",
        "test_graph.test_twice-x@x.graph",
    ):
        goldens.remove(name)
    assert len(goldens) == 2
    assert all(name.startswith("test_graph.TestLayers.test_step-a_b-") for name in goldens)
    for message in (
        "ConfigValueError: graph_snapshot.check was called twice without a name in test_twice[None]; give each check",
        "ConfigValueError: graph_snapshot.check was called twice with name='x' in test_twice[x]; give each check",
        "ConfigValueError: graph_snapshot.check: name is '../up'; give 1 to 60 letters",
        "ConfigValueError: graph_snapshot.check: name is '.x'; give 1 to 60 letters",
        "ConfigValueError: graph_snapshot.check: name is ''; give 1 to 60 letters",
        "ConfigTypeError: graph_snapshot.check: name is 3; give a str, or None",
        "ConfigTypeError: graph_snapshot.check: lowered is 'a text'; give what step.lower(*batch) returns",
    ):
        assert message in text
    project.outcome("test_graph.py", passed=4, failed=7)


def test_commands_are_seen_from_where_pytest_was_started(project: Project) -> None:
    folder = project.pytester.mkpydir("my tests")
    (project.pytester.path / "test_graph.py").rename(folder / "test_graph.py")
    (folder / "__init__.py").unlink()
    text = project.outcome("my tests", failed=1)
    assert "make it: pytest --graph-update 'my tests/test_graph.py::test_step'\n" in text
    project.outcome("--graph-update", "my tests/test_graph.py::test_step", passed=1)
    assert (folder / GOLDEN).is_file()


def test_in_parallel(project: Project) -> None:
    project.pytester.makepyfile(
        test_graph="""
        import pytest
        from tests.testing.graphs import lowered

        @pytest.mark.parametrize("features", [4, 5])
        def test_step(graph_snapshot, features):
            graph_snapshot.check(lowered(features))
        """
    )
    options = ("-p", "pytest_commfuse", "-p", "no:cacheprovider", "-p", "xdist", "-n", "2", "--dist", "loadgroup")
    result = project.pytester.runpytest_subprocess(*options, "--graph-update", "test_graph.py")
    result.assert_outcomes(passed=2)
    names = [f"test_graph.test_step-{features}.graph" for features in (4, 5)]
    assert project.goldens() == names
    result.stdout.fnmatch_lines(["*goldens written*", *(f"__graphs__/{name}" for name in names)])
    assert all((project.golden.parent / name).read_text().startswith("# schema") for name in names)


def test_writing_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "__graphs__" / "a.graph"
    write_golden(path, "old\n")

    def fails(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        write_golden(path, "new\n")
    assert read_golden(path) == "old\n"
    assert [each.name for each in path.parent.iterdir()] == ["a.graph"]


def test_long_names_are_cut_and_stay_apart() -> None:
    paths = [golden_path(Path("/t/test_a.py"), ("TestA", f"test_b[{'x' * 300}{end}]"), None) for end in "yz"]
    assert paths[0] != paths[1]
    assert all(len(path.name) < 140 and path.name.startswith("test_a.TestA.test_b-xxx") for path in paths)


def test_line_diffs_are_bounded() -> None:
    old = "# torch: 2.0\n" + "".join(f"old {number}\n" for number in range(100))
    new = "# torch: 2.0\n" + "".join(f"new {number} {'x' * 400}\n" for number in range(100))
    lines = compare(old, new).report.partition("--- golden\n")[2].splitlines()
    assert len(lines) == 40
    assert lines[-1].startswith("... and ")
    assert all(len(line) <= 200 for line in lines)
