"""The command line: exit codes, what goes to which stream, and tables at 80 columns."""

import dataclasses
import io
import json
import math
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from pellucid.cli import main
from pellucid.cli.exits import Exit
from pellucid.cli.terminal import OUTPUT_FOLDER
from pellucid.kit.bench.demo import explained
from pellucid.kit.bench.results import SCHEMA, Environment, ModelResult, Report, Startup, SubjectResult
from pellucid.kit.bench.table import model_list, model_table, report_table, seconds_text
from pellucid.kit.runs.run import VERSION
from pellucid.kit.stats import Summary
from pellucid.printing import show

SMALL = ["bench", "pointwise_small", "--backend", "aot_eager", "--no-cold", "--budget", "0.05"]


def example_report() -> Report:
    """A report in which every field has a value, and every kind of value occurs."""
    summary = Summary(1.5e-3, 1.4e-3, 1.7e-3, 12)
    faster, faults = Summary(2.35, 2.25, 2.46, 12), Summary(9876.0, 9000.0, 9999.0, 12)
    start = Startup(12.5, 400 * 2**20, 512 * 2**20)
    eager = SubjectResult("eager", None, summary, Summary(1.0, 1.0, 1.0, 12), summary, 0.1, start, None, 1e-7, True)
    fine = SubjectResult("aot_eager", None, summary, faster, faults, 0.1, start, start, 1e-7, True, 240, 96)
    wrong = SubjectResult("wrong", None, summary, faster, faults, 0.1, start, start, math.inf, False)
    broken = SubjectResult("broken", "KeyError: 'x'", cold=Startup(failure="killed by SIGSEGV"))
    model = ModelResult("bert", 1, 128, "f32", 12, (eager, fine, wrong, broken))
    return Report(SCHEMA, Environment("0.1.0", "2.13.0", "3.11.7", "A CPU", 2, 2, 0.25), (model,))


def run(*args: str):
    return CliRunner().invoke(main, list(args))


def rendered(renderable, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, highlight=False)
    show(console, renderable)
    return console.file.getvalue()


# ----------------------------------------------------------------------------------------------- exit codes


def test_a_good_run_exits_with_0_and_keeps_progress_off_stdout():
    result = run(*SMALL)
    assert result.exit_code == Exit.GOOD, result.output
    assert "aot_eager" in result.stdout and "building" not in result.stdout
    assert "pointwise_small: building" in result.stderr


def test_a_bad_report_exits_with_1(monkeypatch):
    def measured(words, settings, progress, tell):
        report = example_report()
        for model in report.models:
            tell(model)
        return report

    monkeypatch.setattr("pellucid.bench.bench", measured)
    result = run(*SMALL)
    assert result.exit_code == Exit.BAD
    assert "broken: KeyError: 'x'" in result.stdout
    assert "broken, cold process: killed by SIGSEGV" in result.stdout


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["bench", "bart"], "unknown model 'bart': did you mean bert?"),
        (["bench", "xyz"], "unknown model 'xyz': choose from addaddmuladd, bert, "),
        (["bench", "foo2", "--backend", "indictor"], "unknown backend 'indictor': did you mean inductor?"),
        (["bench", "foo2", "--dtype", "f8"], "unknown dtype 'f8': choose from bf16, f32"),
        (["bench", "foo2", "--batch", "0"], "--batch"),
        (["bench", "foo2", "--arg", "a=1"], "--arg belongs to --op"),
        (["bench", "--op", "foo", "--shape", "3"], "unknown operator foo"),
        (["demo", "--model", "bart"], "unknown model 'bart'"),
        (["bensch"], "No such command 'bensch'"),
        (["explain", "--"], "TARGET is FILE.py:NAME, where NAME() returns"),
        (["explain", "--"], "For example:\n  pellucid explain -- python train.py\n"),
        (["run"], "For example:\n  pellucid run -- python train.py\n"),
        (["capture", "no.py:x", "-o", "/proc/no/run"], "cannot write to /proc/no/run: "),
        (["capture", "no.py:x", "-o", f"{__file__}/run"], "/run: Not a directory"),
        (["doctor", "-o", "/proc/no/machine.json"], "cannot write to "),
        (["profile", "no.py:x", "--trace", "/no-dir/t.json"], "/t.json: there is no folder /no-dir; create it first"),
        (["profile", "no.py:x", "--callgraph", "/no-dir/c.pstats"], "there is no folder /no-dir; create it first"),
        (["profile", "no.py:x", "--trace", f"{__file__}/trace.json"], "cannot write to "),
        (["profile", "no.py:x", "-o", "/proc/no/run"], "cannot write to /proc/no/run: "),
        (["doctor", "-o", "/no-dir/machine.json"], "there is no folder /no-dir; create it first"),
        (["check", "pyhton", "train.py"], "pyhton is neither a TARGET nor Python; to run a script, write -- python"),
    ],
)
def test_a_wrong_call_exits_with_255_and_says_what_would_be_right(args, complaint):
    result = run(*args)
    assert result.exit_code == Exit.FAILED
    assert complaint in result.stderr and result.stdout == ""


@pytest.mark.parametrize("args", [["explain"], ["check", "x:y", "z:y"], ["check", "x", "--timeout", "-1"]])
def test_in_a_terminal_a_wrong_call_is_told_in_whole_words(args, monkeypatch):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr("pellucid.cli.terminal.err", console)
    assert run(*args).exit_code == Exit.FAILED
    assert all(len(line) <= 80 for line in console.file.getvalue().splitlines())
    assert console.file.getvalue().startswith("Error: ")


def test_a_folder_that_is_written_to_is_not_made_before(tmp_path):
    OUTPUT_FOLDER.convert(str(tmp_path / "a" / "run"), None, None)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("words", [["minify", "a.py:f"], ["testgen", "a.py:f"], ["explain", "--", "python", "a.py"]])
def test_a_working_folder_that_cannot_be_written_is_told_before_the_work(words, monkeypatch):
    monkeypatch.chdir("/proc")
    result = run(*words)
    assert result.exit_code == Exit.FAILED
    assert "cannot write to pellucid_runs" in result.stderr and "with -o" in result.stderr


def test_a_folder_that_has_a_run_is_told_before_the_program_runs(tmp_path):
    (tmp_path / "run.json").touch()
    (tmp_path / "program.py").write_text("raise SystemExit('it ran')")
    for program in (f"{tmp_path}/program.py:make",), ("--", sys.executable, f"{tmp_path}/program.py"):
        assert "has a run already" in run("capture", "-o", str(tmp_path), *program).stderr


def test_the_list_of_commands_has_whole_sentences():
    listed = run("--help").output.partition("Commands:")[2]
    assert "..." not in listed and "and which step of it is at fault?" in " ".join(listed.split())


def test_a_model_that_cannot_be_built_here_exits_with_125(monkeypatch):
    def no_transformers(*args):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr("pellucid.bench.bench", no_transformers)
    result = run("bench", "bert")
    assert result.exit_code == Exit.SKIP
    assert "pellucid[bench]" in result.stderr


def test_a_demo_without_transformers_exits_with_125(monkeypatch):
    def no_transformers(*args):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr("pellucid.kit.bench.demo.demo", no_transformers)
    result = run("demo")
    assert result.exit_code == Exit.SKIP
    assert "pellucid[bench]" in result.stderr and "Traceback" not in result.stderr


def test_a_tool_that_breaks_exits_with_255_not_1(monkeypatch):
    def broken(*args):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("pellucid.bench.bench", broken)
    result = run(*SMALL)
    assert result.exit_code == Exit.FAILED
    assert "a bug of ours" in result.stderr


def test_version_and_help():
    assert run("--version").stdout.startswith("pellucid, version ")
    assert isinstance(main, click.Group)
    assert set(main.commands) == {"bench", "bisect", "cache", "capture", "check", "cosim", "demo", "diagnose", "diff",
                                  "doctor", "explain", "match", "metrics", "minify", "profile", "replay", "report",
                                  "run", "testgen"}  # fmt: skip
    assert run("--help").exit_code == Exit.GOOD


@pytest.mark.parametrize("command", sorted(main.commands))
def test_the_help_of_a_command_has_an_example_that_names_it(command):
    result = run(command, "--help")
    assert result.exit_code == Exit.GOOD
    calls = result.output.partition("For example:\n")[2].splitlines()
    assert calls and all(call.strip().startswith(f"pellucid {command} ") for call in calls)


def test_usage_says_what_a_command_takes():
    testgen = run("testgen", "--help").output
    assert "testgen [OPTIONS] TARGET [KERNEL]..." in testgen and "Write the tests to FOLDER/tests" in testgen
    replay = run("replay", "--help").output
    assert "replay [OPTIONS] RUN" in replay and "FILE.py:NAME" not in replay


@pytest.mark.parametrize("call", [("diff", "{}", "no_run"), ("diff", "no_run", "{}"), ("replay", "no_run")])
def test_a_folder_that_is_not_there_is_told_as_that(call, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"kind": "program", "schema_version": VERSION, "graphs": []}))
    result = run(*(each.format(tmp_path) for each in call))
    assert result.exit_code == Exit.FAILED and "there is no folder no_run" in result.output


def test_python_m_pellucid_is_the_command():
    ended = subprocess.run([sys.executable, "-m", "pellucid", "--version"], capture_output=True, text=True)
    assert ended.stdout.startswith("pellucid, version "), ended.stderr


# ------------------------------------------------------------------------------------------------- output


def test_reports_go_to_json_and_come_back_equal():
    report = example_report()
    text = report.to_json()
    assert Report.from_json(text) == report
    assert "Infinity" not in text  # which is no JSON
    assert [s.good for s in report.models[0].subjects] == [True, True, False, False]
    assert not report.good


def test_another_schema_is_refused():
    data = json.loads(example_report().to_json()) | {"schema": SCHEMA + 1}
    with pytest.raises(ValueError, match="schema"):
        Report.from_json(json.dumps(data))


def test_json_is_the_whole_of_stdout():
    result = run(*SMALL, "--json")
    report = Report.from_json(result.stdout)
    assert json.loads(result.stdout)["environment"]["torch"]
    assert report.models[0].subjects[1].name == "aot_eager"


def test_the_list_names_every_model_and_the_usual_backends():
    text = run("bench", "--list").stdout
    for name in ("mobilebert", "bert", "gpt2", "softmax", "eager", "inductor"):
        assert name in text


def test_the_fullest_table_fits_80_columns():
    report = example_report()
    full = report.models[0].subjects[1]
    assert full.kernels is not None
    text = rendered(report_table(report))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text  # nothing was cut
    for cell in ("1.50 ms ±10%", "2.35x ±4%", "12.5", "512", "9876", "1e-07", "240+96", "inf"):
        assert cell in text


def test_columns_that_nobody_fills_are_left_out():
    summary = Summary(1.0, 1.0, 1.0, 5)
    plain = SubjectResult("eager", None, summary, summary, summary, 0.1, error=0.0, accurate=True)
    text = rendered(model_table(ModelResult("own", 1, 128, "f32", 5, (plain,))))
    assert "first" in text and "cold" not in text and "kernels" not in text and "MiB" not in text


def test_the_legend_is_of_the_columns_that_are_there():
    summary = Summary(1.0, 1.0, 1.0, 5)
    own = SubjectResult("eager", None, summary, summary, summary, 0.1, error=0.0, accurate=True)
    report = dataclasses.replace(example_report(), models=(ModelResult("own", 1, 128, "f32", 5, (own,)),))
    text = rendered(report_table(report))
    assert "faults: minor" in text and "cold:" not in text and "MiB:" not in text and "kernels:" not in text
    assert "cold:" in rendered(report_table(example_report()))


def test_the_model_list_fits_80_columns():
    assert max(map(len, rendered(model_list()).splitlines())) <= 80


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.34, "12.3 s"), (0.99996, "1.00 s"), (0.0521, "52.1 ms"), (9.999e-3, "10.0 ms"), (8.6e-6, "8.60 us"),
     (3e-7, "300 ns")],
)  # fmt: skip
def test_durations_have_three_digits_and_a_unit(seconds, text):
    assert seconds_text(seconds) == text


# --------------------------------------------------------------------------------------------------- demo


def test_the_run_folder_is_explained_file_by_file(tmp_path):
    for name in (
        "run.json",
        "graph_0/output_code.py",
        "graph_1/output_code.py",
        "decisions.csv",
        "other.bin",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    files = list(explained(tmp_path))
    assert [str(f.path) for f in files] == ["run.json", "graph_0/output_code.py", "decisions.csv"]
    assert [f.count for f in files] == [1, 2, 1]


def test_a_demo_in_which_pellucid_fails_has_no_run_folder(monkeypatch, tmp_path):
    failed = SubjectResult("pellucid", "KeyError: 'x'")
    report = dataclasses.replace(example_report(), models=(ModelResult("bert", 1, 128, "f32", 12, (failed,)),))
    monkeypatch.setattr("pellucid.kit.bench.demo.bench", lambda *args: report)
    result = run("demo", "--dir", str(tmp_path / "run"))
    assert result.exit_code == Exit.BAD
    assert "pellucid: KeyError: 'x'" in result.stdout and "run folder" not in result.stdout
    assert not (tmp_path / "run").exists()


def test_the_demo_prints_the_table_and_the_folder(monkeypatch, tmp_path):
    def demo(folder, *rest):
        from pellucid.kit.bench.demo import Demo

        (folder / "decisions.csv").touch()
        return Demo(example_report(), folder)

    monkeypatch.setattr("pellucid.kit.bench.demo.demo", demo)
    result = run("demo", "--dir", str(tmp_path))
    assert result.exit_code == Exit.BAD  # the example has failures
    assert f"\n  {tmp_path}\n" in result.stdout  # whole, however long it is
    assert "bert: batch 1 x 128" in result.stdout
    assert "decisions.csv" in result.stdout and "with its reason" in result.stdout


@pytest.mark.parametrize("budget", ["nan", "-1", "0", "inf", "soon"])
@pytest.mark.parametrize("command", ["bench", "demo"])
def test_a_budget_is_a_time(command, budget):
    result = CliRunner().invoke(main, [command, "--budget", budget])
    assert result.exit_code == Exit.FAILED and "--budget" in result.output and "Traceback" not in result.output


def test_a_sequence_longer_than_the_model_allows_is_a_wrong_call():
    pytest.importorskip("transformers")
    result = CliRunner().invoke(main, ["bench", "mobilebert", "--seq", "100000", "--no-cold", "--backend", "aot_eager"])
    assert result.exit_code == Exit.FAILED
    assert "mobilebert takes sequences of at most 512 tokens, not 100000" in result.output


def test_an_interrupted_command_says_nothing_of_the_program(monkeypatch, tmp_path):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(main.commands["diff"], "callback", interrupted)
    run = CliRunner().invoke(main, ["diff", str(tmp_path), str(tmp_path)])
    assert run.exit_code == Exit.FAILED and "interrupted" in run.output
