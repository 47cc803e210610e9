"""Reference machines, used if the machine has not been measured: one for each instruction set, from measurements.

With them kernels are the same on every such machine, and in every run of the tests.
"""

from __future__ import annotations

from dataclasses import replace

from pellucid.machine.model import Machine, Rate, make_machine, rounded

_CACHES = {"l1": 32 << 10, "l2": 1 << 20, "l3": 32 << 20}

# Two cores of an AMD EPYC (Zen 4) in a virtual machine.
_BANDWIDTH = {
    "l1.read.one": 160.0,
    "l1.read.all": 250.0,
    "l1.write.one": 200.0,
    "l1.write.all": 630.0,
    "l2.read.one": 80.0,
    "l2.read.all": 160.0,
    "l2.write.one": 80.0,
    "l2.write.all": 160.0,
    "l3.read.one": 40.0,
    "l3.read.all": 125.0,
    "l3.write.one": 100.0,
    "l3.write.all": 125.0,
    "memory.read.one": 31.5,
    "memory.read.all": 31.5,
    "memory.write.one": 25.0,
    "memory.write.all": 31.5,
    "latency": 125.0,
    "barrier": 800.0,
    "call": 50.0,
    "dispatch": 800.0,
    "page": 2000.0,
}
_AVX2 = {
    "flops.f32.one": 100.0,
    "flops.f32.all": 200.0,
    "flops.f64.one": 50.0,
    "flops.f64.all": 100.0,
    "flops.bf16.one": 100.0,
    "flops.bf16.all": 200.0,
    "flops.f16.one": 100.0,
    "flops.f16.all": 200.0,
    "product.f32.one": 80.0,
    "product.f32.all": 160.0,
    "product.f64.one": 31.5,
    "product.f64.all": 50.0,
    "product.bf16.one": 2.5,
    "product.bf16.all": 2.5,
    "product.f16.one": 2.5,
    "product.f16.all": 2.5,
    "convolution.one": 63.0,
    "convolution.all": 100.0,
    "attention.f32.one": 40.0,
    "attention.f32.all": 63.0,
    "attention.f64.one": 25.0,
    "attention.f64.all": 40.0,
    "attention.bf16.one": 25.0,
    "attention.bf16.all": 40.0,
    "attention.f16.one": 25.0,
    "attention.f16.all": 40.0,
}
_AVX512 = {
    "flops.f32.one": 125.0,
    "flops.f32.all": 250.0,
    "flops.f64.one": 63.0,
    "flops.f64.all": 125.0,
    "flops.bf16.one": 250.0,
    "flops.bf16.all": 500.0,
    "flops.f16.one": 125.0,
    "flops.f16.all": 250.0,
    "product.f32.one": 80.0,
    "product.f32.all": 160.0,
    "product.f64.one": 40.0,
    "product.f64.all": 80.0,
    "product.bf16.one": 200.0,
    "product.bf16.all": 400.0,
    "product.f16.one": 2.5,
    "product.f16.all": 2.5,
    "convolution.one": 100.0,
    "convolution.all": 200.0,
    "attention.f32.one": 50.0,
    "attention.f32.all": 80.0,
    "attention.f64.one": 25.0,
    "attention.f64.all": 40.0,
    "attention.bf16.one": 63.0,
    "attention.bf16.all": 100.0,
    "attention.f16.one": 25.0,
    "attention.f16.all": 40.0,
}


def _machine(isa: str, flops: dict[str, float]) -> Machine:
    return rounded(make_machine(f"reference {isa}", isa, 2, _CACHES, {**_BANDWIDTH, **flops}))


AVX2 = _machine("AVX2", _AVX2)
AVX512 = _machine("AVX512", _AVX512)
REFERENCES = {machine.isa.name: machine for machine in (AVX2, AVX512)}

# In bf16 with AMX tiles: two cores of an Intel Xeon (Granite Rapids) in a virtual machine.
_TILES = {
    "flops": Rate(3150.0, 6300.0),
    "product": Rate(800.0, 1000.0),
    "attention": Rate(100.0, 200.0),
}


def with_tiles(machine: Machine) -> Machine:
    """`machine` with the rates of AMX tiles."""
    return rounded(
        replace(machine, **{name: replace(getattr(machine, name), bf16=rate) for name, rate in _TILES.items()})
    )
