from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pellucid.errors import InternalError, ToolchainError
from pellucid.native import build as build_module
from pellucid.native.build import KernelCompileError, build, default_toolchain
from pellucid.native.compiler import Blame, Compiler, blame, shared_parts
from pellucid.native.session import SESSION
from pellucid.native.store import KernelStore
from tests.support import native_function
from tests.unit.native.support import DOUBLE, kernel_text, product


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> KernelStore:
    return KernelStore("key", tmp_path_factory.mktemp("store"))


def constant(name: str, value: int) -> str:
    return kernel_text(name, f"  return {value};")


def call(address: int) -> int:
    return native_function(address)(None, None, 0, 0)


def forget_loaded(monkeypatch) -> None:
    """As if in a new process."""
    monkeypatch.setattr(SESSION, "addresses", {})


def test_builds_what_is_missing_and_finds_the_rest(store, monkeypatch):
    first, report = build({"k1": constant("k1", 1), "k2": constant("k2", 2)}, store=store)
    assert report.built == ("k1", "k2") and report.found == () and report.compile_s > 0 and report.link_s > 0
    both = {"k2": constant("k2", 2), "k3": constant("k3", 3)}
    second, report = build(both, store=store)
    assert report.found == ("k2",) and report.built == ("k3",)
    assert [call(first["k1"]), call(first["k2"]), call(second["k3"])] == [1, 2, 3]
    assert second["k2"] == first["k2"]
    forget_loaded(monkeypatch)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("nothing is to be compiled"))
    third, report = build(both, store=KernelStore("key", store.root))
    assert report.built == () and [call(third["k2"]), call(third["k3"])] == [2, 3]


def test_symbols_of_libtorch_resolve(store):
    declared = 'extern "C" { int torch_get_num_threads(unsigned*); __m256 Sleef_expf8_u10(__m256); }\n'
    text = declared + kernel_text(
        "threads", "  unsigned n = 0; torch_get_num_threads(&n); return n + (int64_t)Sleef_expf8_u10(__m256{})[0];"
    )
    addresses, _ = build({"threads": text}, store=store)
    assert call(addresses["threads"]) >= 2


def test_large_batches_are_split(store):
    filler = "// " + "x" * 5000 + "\n"
    sources = {f"big{i}": filler + constant(f"big{i}", i) for i in range(6)}
    shards = build_module._shards(sources)
    assert len(shards) > 1 and sorted(name for shard in shards for name in shard) == sorted(sources)
    addresses, report = build(sources, store=store)
    assert [call(addresses[f"big{i}"]) for i in range(6)] == list(range(6)) and len(report.built) == 6


def test_products_take_longer_than_their_text(monkeypatch):
    monkeypatch.setattr(build_module, "usable_cores", lambda: 2)
    sources = {f"product{i}": "pv::contract<1>();" for i in range(8)} | {"plain": "x" * 8000}
    assert sorted(map(len, build_module._shards(sources))) == [3, 6]
    monkeypatch.setattr(build_module, "usable_cores", lambda: 4)
    assert len(build_module._shards(sources)) == 4


@pytest.mark.sampled
@pytest.mark.parametrize("element", ["float", "bf16", "f16"])
def test_what_kernels_share_is_compiled_once_for_each_type(store, monkeypatch, element):
    monkeypatch.setattr("pellucid.native.compiler.shipped", lambda _: None)
    addresses, _ = build({f"first_{element}": product(f"first_{element}", element, 9)}, store=store)
    assert call(addresses[f"first_{element}"]) == 3
    assert (store.directory / "files" / f"shared-products_{element}.o").exists()
    monkeypatch.setattr(Compiler, "_compile_shared", lambda *_: pytest.fail("it is compiled already"))
    addresses, _ = build({f"then_{element}": product(f"then_{element}", element, 24)}, store=store)
    assert call(addresses[f"then_{element}"]) == 3


def test_kernels_that_share_nothing_need_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("pellucid.native.compiler.shipped", lambda _: None)
    store = KernelStore("key", tmp_path)
    build({"plain": constant("plain", 1)}, store=store)
    assert not list((store.directory / "files").glob("shared-*"))
    assert shared_parts("pv::store<float>") == ()
    assert shared_parts("pv::contract<9, 32, 64>") == ("products_float", "dots_float")
    narrow = shared_parts("pv::contract_spread<32>(pv::Window<pv::f16>")
    assert narrow[2:] == ("dots_float", "dots_f16", "windows_float", "windows_f16", "spread_float")
    assert [part.split("_")[0] for part in shared_parts("pv::attend_backward<64>")] == ["products", "dots", "attention"]


@pytest.mark.parametrize("columns", [0, 32, 64, 768, 31, 60])
def test_whole_panels_need_no_halves(columns):
    assert "halves_float" not in shared_parts(f"pv::contract<9, 32, {columns}>(")


@pytest.mark.parametrize("columns", [1, 8, 16, 48, 144, 24])  # of 8 or of 16 lanes
def test_a_panel_of_which_a_half_is_computed_needs_halves(columns):
    for text in (
        f"pv::contract<9, 32, {columns}>(",
        f"pv::contract_tiles<2, 32, {columns}, 7>(",
        f"pv::attend<{columns}, 1>(",
    ):
        assert "halves_float" in shared_parts(text)


def test_a_refused_kernel_is_named_with_its_line(store):
    bad = kernel_text("bad", "  int64_t a = 1;\n  return a + nonsense;")
    sources = {"good": constant("good", 1), "bad": bad, "other": constant("other", 2)}
    with pytest.raises(KernelCompileError) as error:
        build(sources, store=store)
    assert (error.value.kernel, error.value.line) == ("bad", 3)
    assert "nonsense" in error.value.detail and "return a + nonsense;" in str(error.value)
    assert error.value.command[0] == default_toolchain().compiler[0]


def test_an_error_inside_the_header_is_the_callers(store):
    bad = "struct S {};\n" + kernel_text("bad", "\n  S a, b;\n  pv::maximum(a, b);\n  return 0;")
    with pytest.raises(KernelCompileError) as error:
        build({"good": constant("good", 4), "bad": bad}, store=store)
    assert (error.value.kernel, error.value.line) == ("bad", 5) and "operator!=" in error.value.detail


def test_blame_reads_the_chain_of_instantiations():
    output = """\
In file included from kernels.cpp:1:
prelude.h: In instantiation of 'T pv::f(T) [with T = S]':
k2:7:12:   required from here
prelude.h:120:9: error: no match for 'operator+'
k1:3:1: error: later
"""
    assert blame(output, {"k1": "", "k2": ""}) == Blame("k2", 7, "no match for 'operator+'")
    assert blame("cc1plus: out of memory", {"k1": ""}) is None
    assert blame("k1:9:2: internal compiler error: Segmentation fault", {"k1": ""}) == Blame(
        "k1", 9, "Segmentation fault"
    )


def test_without_a_name_in_the_messages_each_kernel_is_tried(store):
    sources = {"fine": constant("fine", 1), "odd": '#line 1 "elsewhere.cpp"\n' + kernel_text("odd", "  return x;")}
    with pytest.raises(KernelCompileError) as error:
        build(sources, store=store)
    assert error.value.kernel == "odd" and error.value.line == 0 and "'x' was not declared" in error.value.detail


def test_a_kernel_that_cannot_be_loaded_is_an_error(store):
    text = 'extern "C" int64_t no_such_function();\n' + kernel_text("unresolved", "  return no_such_function();")
    with pytest.raises(ToolchainError, match=r"unresolved was built but cannot be loaded.*no_such_function"):
        build({"unresolved": text}, store=store)
    with pytest.raises(ToolchainError, match="cannot be loaded"):
        build({"unresolved": text}, store=store)


def test_names_must_be_identifiers(store):
    for name in ("../k", "a b", "", "1a"):
        with pytest.raises(InternalError, match="not a C identifier"):
            build({name: ""}, store=store)


def test_the_source_lies_beside_the_library(store):
    build({"kept": kernel_text("kept", DOUBLE)}, store=store)
    texts = [path.read_text() for path in Path(store.directory / "batches").glob("*.cpp")]
    assert any('#line 1 "kept"' in text for text in texts)
