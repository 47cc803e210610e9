"""A sanitizer's report names the kernel, its line, the operator and the user's line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid.ir.origin import GLUE
from pellucid.kit.debug.check import check_isolated, line_in
from pellucid.kit.process.sanitizer import Place, places_in, report_in
from pellucid.kit.runs.target import Request
from pellucid.kit.subjects.base import Step

FILE = f"{Path(__file__).parent}/sanitized.py"

SAID = """\
UserWarning: something else
==77==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x62 at pc 0x7f bp 0x7f sp 0x7f
WRITE of size 32 at 0x621000865d00 thread T0
    #0 0x7f in void pv::store<float, 8>(float*, pv::Vec<8> const&) /store/prelude.h:562
    #1 0x7f in operator()<pv::All<8> > /somewhere/k_neg_1:12
    #2 0x7f in k_neg_1 /somewhere/k_neg_1:7
    #3 0x7f in execute (/store/runtime.so+0x324)

0x621000865d00 is located 0 bytes to the right of 4096-byte region
SUMMARY: AddressSanitizer: heap-buffer-overflow
"""


def test_a_report_is_found_and_read():
    report = report_in(SAID)
    assert report.splitlines()[0] == "AddressSanitizer: heap-buffer-overflow, WRITE of size 32"
    assert [place.line for place in places_in(report)] == [562, 12, 7]
    said = "k_add_2:4:7: runtime error: signed integer overflow\n    #0 0x7f in k_add_2 k_add_2:4\n"
    assert report_in(said).startswith("runtime error: signed integer overflow")
    assert not report_in("Segmentation fault") and not list(places_in(""))


def test_the_innermost_line_of_the_kernel_counts(tmp_path):
    step = Step("neg_0", "", GLUE, symbol="k_neg_1", source="line\n" * 20, lines=(GLUE,) * 20)
    assert line_in(step, places_in(report_in(SAID))) == 12
    (tmp_path / "c.cpp").write_text("#include <header>\n" + step.source)
    assert line_in(step, [Place("/other.cpp", 3), Place(str(tmp_path / "c.cpp"), 4)]) == 3
    assert line_in(step, [Place("/other.cpp", 3)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pellucid", "inductor"])
@pytest.mark.parametrize("threads", [0, 1])
def test_a_write_behind_a_buffer_is_named(backend, threads):
    found = check_isolated(Request(f"{FILE}:{backend}_beyond", backend, threads=threads, sanitize=True))
    assert found.failure is not None and found.failure.text.startswith("AddressSanitizer: heap-buffer-overflow, WRITE")
    assert found.step is not None and "sub" in found.step.fx_nodes and "store" in found.step.line
    assert any(line.endswith("sanitized.py:16") for line in found.step.user_lines)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pellucid", "inductor"])
def test_undefined_behaviour_is_named(backend):
    target = f"{FILE}:{backend}_overflows"
    assert check_isolated(Request(target, backend)).good  # nothing shows without
    found = check_isolated(Request(target, backend, sanitize=True))
    assert found.failure is not None and "signed integer overflow" in found.failure.text
    assert found.step is not None and "sub" in found.step.fx_nodes
    assert any(line.endswith("sanitized.py:16") for line in found.step.user_lines)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pellucid", "inductor"])
def test_a_healthy_program_is_left_in_peace(backend):
    assert check_isolated(Request(f"{FILE}:program", backend, sanitize=True)).good
