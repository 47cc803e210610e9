"""`pellucid run`: the environment of a command is what the doctor recommends, and what the user set stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from pellucid.cli import main
from pellucid.errors import NotJudged, UserError
from pellucid.kit.debug import launch as module
from pellucid.kit.debug.doctor import KEEP_PAGES, WARNING, Check
from pellucid.kit.debug.launch import Gain, Launch, Setting, compare, plan, settings_of
from pellucid.kit.show import shown
from pellucid.kit.stats import Summary
from pellucid.printing import plain as text

CHECKS = (
    Check("threads", WARNING, "16 threads on 8 cores", "OMP_NUM_THREADS=8", {"OMP_NUM_THREADS": "8"}),
    Check("container", WARNING, "CPU time of 2 cores", "fewer", {"OMP_NUM_THREADS": "2"}),
    Check("allocator", WARNING, "12288 page faults", "keep them", {"MALLOC_TRIM_THRESHOLD_": "1"}),
    Check("versions", "good", "Python"),
)


@pytest.fixture(autouse=True)
def checks(monkeypatch):
    monkeypatch.setattr(module, "process_checks", lambda: CHECKS)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)


def test_the_smaller_number_of_threads_counts_and_what_the_user_set_stays():
    found = {each.name: each for each in settings_of(CHECKS, {"MALLOC_TRIM_THRESHOLD_": "7"})}
    assert found["OMP_NUM_THREADS"].value == "2" and found["OMP_NUM_THREADS"].check == "container"
    assert found["OMP_NUM_THREADS"].applied and not found["MALLOC_TRIM_THRESHOLD_"].applied
    told = text(shown(Launch(("x",), tuple(found.values()))))
    assert "OMP_NUM_THREADS=2" in told and "stays, as you set it" in told and "CPU time of 2 cores" in told


def test_threads_are_bound_only_if_that_is_asked_for():
    assert not any(each.name == "OMP_PROC_BIND" for each in plan(["true"]).settings)
    assert plan(["true"], pin=True).variables()["OMP_PROC_BIND"] == "close"


@pytest.mark.sampled
def test_the_command_gets_the_environment_and_gives_its_exit_code():
    program = "import os, sys; print(os.environ['MALLOC_TRIM_THRESHOLD_']); sys.exit(7)"
    command = [sys.executable, "-m", "pellucid", "run", "--", sys.executable, "-c", program]
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "131072"}  # glibc's own
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 7 and found.stdout == "131072\n"
    assert "MALLOC_TRIM_THRESHOLD_=131072 stays, as you set it" in found.stderr


def test_what_is_gained_is_told_by_running_in_turn():
    program = "import os, time; time.sleep(0 if 'OMP_NUM_THREADS' in os.environ else 0.3)"
    found = compare(plan([sys.executable, "-c", program]), 2)
    assert found.gain is not None and found.gain.ratio.count == 2 and found.gain.ratio.median > 1.2
    assert found.gain.plain_seconds.median > 0.3 and "times as fast" in text(shown(found))
    with pytest.raises(NotJudged, match="exits with 3 with the settings"):
        compare(plan([sys.executable, "-c", "raise SystemExit(3)"]), 1)


@pytest.mark.slow  # beside the test above: what is recommended works
def test_the_recommended_allocator_settings_keep_pages():
    program = "from pellucid.kit.debug.doctor import faults_per_page; print(faults_per_page())"
    settings = dict(each.split("=") for each in KEEP_PAGES.split())
    found = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert float(found.stdout) < 0.5, found.stderr  # 1 without them; a round may still meet memory that it never had


def test_a_command_that_is_none_is_refused():
    with pytest.raises(UserError, match="no command"):
        plan(["no-such-command-at-all"])


def test_what_would_be_set_as_json():
    result = CliRunner().invoke(main, ["run", "--dry-run", "--json", "--", "true", "--flag"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["command"] == ["true", "--flag"] and found["settings"][0]["applied"] is True
    assert Setting(**{k: v for k, v in found["settings"][0].items() if k != "applied"}).name == "OMP_NUM_THREADS"


def test_a_gain_says_no_more_than_was_measured():
    def told(count, seconds):
        taken, ratio = Summary(seconds, seconds, seconds, count), Summary(0.89, 0.88, 0.9, count)
        return text(shown(Launch(("x",), (), 0, Gain(taken, taken, 10, 20, ratio))))

    assert "0.89 times as fast with it (of one pair): 1.2 ms, 1.2 ms without" in told(1, 1.2e-3)
    assert "(quartiles 0.88 to 0.90 of 2 pairs): 0.30 s, 0.30 s without" in told(2, 0.3)


@pytest.mark.parametrize("how", [["--dry-run"], ["--compare", "1"]])
def test_only_the_variables_that_are_recommended_are_told(how, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "not-to-be-told")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    result = CliRunner().invoke(main, ["run", *how, "--json", "--", "true"])
    assert result.exit_code == 0, result.output
    assert "not-to-be-told" not in result.output
    assert json.loads(result.stdout)["environment"] == {
        "OMP_NUM_THREADS": {"before": None, "after": "2"},
        "MALLOC_TRIM_THRESHOLD_": {"before": "7", "after": "7"},
    }


def test_with_json_what_the_command_prints_goes_to_stderr(capfd):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--compare", "1", "--json", "--", "echo", "{}"])
    told = capfd.readouterr()
    assert ended.value.code == 0 and told.err == "{}\n"
    assert json.loads(told.out)["gain"]["ratio"]["count"] == 1
