"""The page of `pellucid report`: its charts against hand counts, what a stranger's run may do, and in a browser."""

from __future__ import annotations

import csv
import html
import itertools
import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pellucid import pipeline
from pellucid.cli import main
from pellucid.errors import UserError
from pellucid.kit.debug.doctor import Check
from pellucid.kit.profile.compare import compare
from pellucid.kit.profile.result import (
    Advice,
    KernelTime,
    Overhead,
    Profile,
    PythonCall,
    PythonFunction,
    PythonPart,
    PythonSide,
)
from pellucid.kit.profile.saved import saved, saved_profile
from pellucid.kit.report.charts import cosim_strip, roofline, threads
from pellucid.kit.report.drawing import MAX_BOXES, Step, draw, draw_calls
from pellucid.kit.report.material import place_of
from pellucid.kit.report.page import notebook
from pellucid.kit.report.request import measure, save_program, write_page
from pellucid.kit.runs.target import Request
from pellucid.kit.shown import plain
from pellucid.machine import AVX2
from pellucid.machine.model import to_text
from pellucid.trace.folder import RunWriter, write_json
from pellucid.trace.schema import TABLES, USER_SOURCE

HOSTILE = (
    "</script></textarea></title><img src=x onerror=hacked()><script>hacked()</script>\" onload='hacked()' `{{7*7}}`"
)


def kernel(name: str = "add_0", **more: Any) -> KernelTime:
    given: dict[str, Any] = dict(
        kind="kernel", group="element-wise and reductions", symbol=f"k_{name}", calls=1.0, microseconds=10.0,
        spread=0.1, total_microseconds=10.0, share=0.5, shapes=("f32[8]",), results=("f32[8]",), bytes=1000, flops=100,
        limit="memory", percent_of_limit=50.0, estimate_microseconds=5.0, threads=2, imbalance=0.25,
        fx_nodes=("add",), user_lines=("/home/me/model.py:3 (block)",), steps=("inference_0/add_0",),
    )  # fmt: skip
    return KernelTime(name=name, **{**given, **more})


def profile(*kernels: KernelTime, **more: Any) -> Profile:
    found = Profile("pellucid", "model.py:make", 5, 20.0, 0.1, 19.0, 1.0, 2, kernels, Overhead(1.0, 2.0))
    return replace(found, **{"machine": "this one", **more})


def run_with(folder: Path, found: Profile, text: str = "add_0") -> Path:
    """A run whose every text is `text` where it may be any."""
    writer = RunWriter.create(folder, backend="pellucid", options={}, target=text)
    writer.note(graphs=["inference_0"], compiled={"inference_0": {"verdict": text}}, environment={text: text})
    writer.add_texts("inference_0", {
        "fx_graph_readable.py": f"# File: /home/me/model.py:3 in f, code: x\n    add: \"f32[8]\" = {text}\n",
        "ir_post_fusion.txt": f"program {{\n  kernel add_0(\n    v0 = load x  # add  {text}\n  }}\n}}\n",
    })  # fmt: skip
    add = {"name": "add", "args": {"tuple": [{"node": text}]}, "kwargs": {"dict": []}}
    write_json(folder / "graphs/inference_0/graph.json", {"nodes": [add]})
    writer.add_sources({"k_add_0": f"auto v0 = 1;  // add  /home/me/model.py:3 {text}\n"})
    row = {"graph": "inference_0", "kernel": "add_0", "op": text, "fx_nodes": f"add {text}"}
    writer.add_rows("kernels.csv", [dict.fromkeys(TABLES["kernels.csv"], "") | row])
    write_json(folder / USER_SOURCE, {"/home/me/model.py": {"3": text, "4": "y"}, text: {"1": text}})
    with (folder / "cosim.csv").open("w", newline="") as out:
        csv.writer(out).writerows([["graph", "kernel", "fx_node", "verdict", "error", "why"], [text] * 6])
    call = {"ph": "X", "cat": "program", "tid": 1, "ts": 0, "dur": 10, "name": text}
    write_json(folder / "trace.json", {"traceEvents": [call, {**call, "cat": text}]})
    write_json(folder / "doctor.json", [plain(Check(text, text, text, text))])
    (folder / "machine.json").write_text(to_text(AVX2))
    write_json(folder / "profile.json", plain(found))
    write_json(folder / "profile_against_x.json", plain(compare(found, replace(found, backend=text))))
    return folder


def test_what_is_saved_is_read_again(tmp_path):
    told = Advice("fallback", "compile it", ("add_0", "model.py:3"), "it takes 50%", 1.9, "pellucid explain")
    found = profile(kernel(), advice=(told,))
    write_json(tmp_path / "profile.json", plain(found))
    assert saved_profile(tmp_path) == found
    write_json(tmp_path / "profile.json", plain(compare(found, found)))
    assert saved(tmp_path / "profile.json").theirs == found and saved_profile(tmp_path) == found


# ------------------------------------------------------------------------------------------------ charts


def test_points_of_the_roofline_lie_where_they_were_measured():
    machine = replace(AVX2, levels=AVX2.levels[-1:])
    rows = [kernel(flops=100, bytes=1000), kernel(flops=1_000_000, bytes=1000), kernel(flops=None), kernel(flops=0)]
    found = roofline(rows, machine, 1)
    assert found is not None and found.left_out == 2
    at = {point.number: point for point in found.points}
    decade = found.ticks_x[1].x1 - found.ticks_x[0].x1
    assert at[1].x - at[0].x == pytest.approx(4 * decade)  # 0.1 and 1000 FLOPs a byte
    rise = found.ticks_y[0].y1 - found.ticks_y[1].y1
    assert at[0].y - at[1].y == pytest.approx(4 * rise)  # 0.01 and 100 GFLOP/s
    slope, flat = found.roofs
    assert flat.y1 == flat.y2 == pytest.approx(slope.y2) and flat.x1 == pytest.approx(slope.x2)
    assert roofline([kernel(flops=None)], machine, 1) is None
    without = roofline(rows, None, 1)
    assert without is not None and not without.roofs and len(without.points) == 2


def test_threads_at_work_are_counted_in_the_last_call():
    def event(cat, tid, ts, dur, name="k"):
        return {"cat": cat, "tid": tid, "ts": ts, "dur": dur, "name": name}

    early = event("program", 1, 0, 50)
    call = [event("program", 1, 100, 100), event("kernel", 1, 110, 50), event("share", 2, 110, 40)]
    found = threads([early, event("kernel", 1, 0, 50), *call])
    assert found is not None and found.active == pytest.approx(0.9) and found.milliseconds == pytest.approx(0.1)
    assert [track.busy for track in found.tracks] == pytest.approx([0.5, 0.4])
    assert found.outline.startswith("0,40 118.0,40.0 118.0,20.0 118.0,0.0 590.0,0.0 590.0,20.0 708.0,20.0 708.0,40.0")
    assert threads([]) is None


def test_wrong_results_stay_cells_of_their_own():
    row = {"graph": "g", "kernel": "k", "fx_node": "n", "verdict": "ok", "error": "0", "why": ""}
    rows = [row] * 3000
    rows[1500] = {**row, "verdict": "wrong", "why": "off"}
    cells = cosim_strip(rows)
    assert [cell.verdict for cell in cells] == ["ok", "wrong", "ok"] and "off" in cells[1].label
    assert cells[1].x == pytest.approx(1180 / 2) and cosim_strip([]) == ()


def nodes(*edges: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "args": {"tuple": [{"node": operand}]}, "kwargs": {}} for operand, name in edges]


def test_boxes_stand_below_what_they_are_made_of_also_through_views():
    steps = [Step("mm_0", False, ("mm",)), Step("gelu_0", True, ("gelu", "add")), Step("other", True, ("exp",))]
    found = draw("g", steps, nodes(("x", "mm"), ("mm", "view"), ("view", "gelu"), ("gelu", "add"), ("x", "exp")))
    product, fused, other = found.boxes[0], found.boxes[2], found.boxes[1]
    assert fused.step.name == "gelu_0" and fused.nodes == ("gelu", "add") and fused.y > product.y == other.y
    assert len(found.arrows) == 1 and not found.is_part


def test_of_a_large_graph_the_hottest_part_is_drawn():
    steps = [Step(f"k{n}", True, (f"n{n}",), share=0.5 if n == 700 else 0.0) for n in range(1000)]
    found = draw("g", steps, nodes(*((f"n{n}", f"n{n + 1}") for n in range(999))))
    assert found.is_part and found.total == 1000 and len(found.boxes) == MAX_BOXES
    assert {box.step.name for box in found.boxes} >= {"k699", "k700", "k701"}


def test_functions_stand_below_those_that_call_them_also_where_they_call_themselves():
    functions = [
        PythonFunction(name, "model.py:1", "your program", 1.0, own, total)
        for name, own, total in (("step", 10.0, 100.0), ("model", 30.0, 90.0), ("log", 60.0, 60.0))
    ]
    calls = (PythonCall(0, 1, 1.0, 90.0), PythonCall(1, 1, 3.0, 9.0), PythonCall(1, 2, 1.0, 60.0))
    found = draw_calls(PythonSide(2.0, 0.0, (), tuple(functions), calls))
    assert found is not None and [box.title for box in found.boxes] == ["step", "model", "log"]
    assert found.boxes[0].y < found.boxes[1].y < found.boxes[2].y and len(found.arrows) == 2
    assert found.boxes[1].nodes == ("model.py:1", "90%, itself 30%", "1 call")
    assert draw_calls(PythonSide(0.0, 0.0, (), (), (), "another tool")) is None


def test_places_of_all_kinds():
    assert place_of("/a/b/c.py:12 (layers.0)").short == "b/c.py:12"
    assert place_of("module 0.norm").short == "module 0.norm" and place_of("c.py:1").line == 1


# ------------------------------------------------------------------------------------------------ strangers


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def hostile(folder: Path) -> Path:
    row = kernel(HOSTILE, symbol="k_add_0", group=HOSTILE, limit=HOSTILE, shapes=(HOSTILE,), fx_nodes=("add", HOSTILE),
                 user_lines=(f"{HOSTILE}:1", "/home/me/model.py:3"))  # fmt: skip
    told = Advice(HOSTILE, HOSTILE, (HOSTILE, HOSTILE), HOSTILE, 1.5, HOSTILE)
    function = PythonFunction(HOSTILE, HOSTILE, HOSTILE, 1.0, 1.0, 1.0)
    python = PythonSide(1.0, 1.0, (PythonPart(HOSTILE, 1.0),), (function,), (), HOSTILE)
    more = {"target": HOSTILE, "failure": HOSTILE, "notes": (HOSTILE,), "advice": (told,), "machine": HOSTILE,
            "python": python}  # fmt: skip
    return run_with(folder, profile(row, **more), HOSTILE)


def test_nothing_of_a_strangers_run_becomes_markup_or_script(tmp_path):
    made = write_page(hostile(tmp_path / "run"), tmp_path / "report.html")
    text = Path(made.page).read_text()
    found = Elements(text).found
    assert not [tag for tag, _ in found if tag in ("img", "iframe", "object", "link", "base")]
    assert sum(tag == "script" for tag, _ in found) == 2 and "49" not in text.partition("<body>")[2].split("viewBox")[0]
    assert not [name for _, attributes in found for name in attributes if name.startswith("on")]
    assert not [v for _, a in found for n, v in a.items() if n in ("src", "href") and not str(v).startswith("#")]
    data = text.partition('id="data">')[2].partition("</script>")[0]
    assert "<" not in data and json.loads(data)["kernels"][0]["name"] == HOSTILE
    frame = notebook(saved_profile(tmp_path / "run"))
    assert [tag for tag, _ in Elements(frame).found] == ["iframe"] and "sandbox" in Elements(frame).found[0][1]


def test_damaged_files_are_said_to_be(tmp_path):
    folder = run_with(tmp_path / "run", profile(kernel()))
    for file, text in (
        ("profile.json", json.dumps(plain(profile(kernel(share="<b>"))))),
        ("trace.json", '{"traceEvents": [{"ph": "X", "cat": "program"}]}'),
        ("doctor.json", '[{"nothing": 1}]'),
        ("machine.json", "{}"),
        ("user_source.json", "[1]"),
    ):
        kept = (folder / file).read_text()
        (folder / file).write_text(text)
        with pytest.raises(UserError):
            write_page(folder, tmp_path / "report.html")
        (folder / file).write_text(kept)
    assert write_page(folder, tmp_path / "report.html").good


def test_the_command_makes_a_page_of_a_run_and_measures_nothing(tmp_path):
    folder = run_with(tmp_path / "run", profile(kernel()))
    result = CliRunner().invoke(main, ["report", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["page"] == str(folder / "report.html") and found["advice"] == [] and Path(found["page"]).is_file()
    result = CliRunner().invoke(main, ["report", str(folder), "-o", str(tmp_path / "there")])
    assert result.exit_code == 0 and (tmp_path / "there/report.html").is_file()
    assert CliRunner().invoke(main, ["report", f"{folder}:inference_0"]).exit_code == 255


def test_a_notebook_shows_the_page():
    text = compare(profile(kernel()), profile(kernel("mul_0")))._repr_html_()
    inner = html.unescape(text.partition('srcdoc="')[2].rpartition('"')[0])
    assert inner.startswith("<!doctype html>") and "Compared with pellucid" in inner


# ------------------------------------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium-headless-shell")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tool:
        made = tool.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


def opened(browser, page: Path):
    """The page in a tab; what goes wrong in there fails the test."""
    tab = browser.new_page(viewport={"width": 1440, "height": 900})
    tab.on("pageerror", lambda error: pytest.fail(f"error in the page: {error}"))
    tab.on("console", lambda said: pytest.fail(f"the page says: {said.text}"))
    tab.goto(page.as_uri())
    return tab


def names(tab) -> list[str]:
    return tab.eval_on_selector_all("#kernels tbody tr:not([hidden]) .name", "all => all.map(each => each.innerText)")


def lines(tab, pane: str) -> list[str]:
    return tab.eval_on_selector_all(
        f"#pane-{pane} .hit, #pane-{pane} .linked", "all => all.map(each => each.innerText)"
    )


GPT2 = """
import torch, transformers

def make():
    config = transformers.GPT2Config(vocab_size=199, n_layer=1, n_embd=72, n_head=4, n_positions=256, use_cache=False,
                                     bos_token_id=0, eos_token_id=None)  # as in other tests: the same kernels
    words = torch.randint(199, (2, 21))
    return transformers.GPT2LMHeadModel(config).eval(), (), {"input_ids": words, "labels": words}
"""


@pytest.mark.sampled
def test_a_training_step_of_gpt2_in_a_browser(browser, tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(GPT2)
    request = Request(f"{tmp_path / 'model.py'}:make", backward=True)
    folder = tmp_path / "run"
    save_program(request, str(folder))
    monkeypatch.setattr(pipeline, "_numbers", itertools.count())  # as in a process of its own
    torch._dynamo.reset()
    measure(request, str(folder), (), 0.05)
    tab = opened(browser, Path(write_page(folder, folder / "report.html").page))

    before = names(tab)
    tab.click("#kernels th:has-text('kernel')")
    assert sorted(names(tab)) == sorted(before) and names(tab) != before
    tab.click("#kernels th:has-text('calls')")
    calls = tab.eval_on_selector_all("#kernels tbody tr", "all => all.map(row => Number(row.cells[3].dataset.key))")
    assert calls == sorted(calls, reverse=True) and len(set(calls)) > 1

    tab.fill("#filter", "activations.py tanh")
    assert 0 < len(names(tab)) < len(before)
    tab.click("#kernels tbody tr:not([hidden])")
    assert any("torch.tanh" in line for line in lines(tab, "python"))
    assert any("tanh" in line for line in lines(tab, "fx"))
    assert "tanh" in tab.inner_text("#pane-ir") and "pv::tanh" in tab.inner_text("#pane-cpp")
    tab.click("#pane-cpp .l:has-text('pv::tanh')")  # a line of C++ leads back to its line of Python
    assert any("tanh" in line for line in lines(tab, "python"))
    tab.close()


def test_hostile_names_do_nothing_in_a_browser(browser, tmp_path):
    page = Path(write_page(hostile(tmp_path / "run"), tmp_path / "report.html").page)
    tab = opened(browser, page)
    tab.evaluate("() => { window.hacked = () => { document.title = 'hacked' } }")
    tab.click("#kernels tbody tr")
    tab.click("#copy")
    assert tab.title() != "hacked" and not tab.query_selector_all("img")
    assert tab.inner_text("#chosen").startswith(HOSTILE[:40]) and HOSTILE in tab.inner_text("#pane-python")
    tab.close()


@pytest.mark.sampled
def test_three_thousand_kernels_stay_quick(browser, tmp_path):
    rows = [kernel(f"add_{n}", total_microseconds=3000.0 - n, share=0.0003, steps=(f"inference_0/add_{n}",))
            for n in range(3000)]  # fmt: skip
    folder = run_with(tmp_path / "run", profile(*rows))
    page = Path(write_page(folder, tmp_path / "report.html").page)
    assert page.stat().st_size < 8e6
    tab = opened(browser, page)
    took = tab.evaluate("""() => {
        const begin = performance.now();
        document.querySelectorAll("#kernels th")[2].click();
        document.body.offsetHeight; // lays the page out
        return performance.now() - begin;
    }""")
    assert took < 5000  # milliseconds, on a machine that others use too
    tab.fill("#filter", "add_299")
    assert len(names(tab)) == 11 and names(tab)[0] == "add_2999"
    tab.close()
