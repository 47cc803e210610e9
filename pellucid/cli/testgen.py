"""`pellucid testgen`: write a test for each kernel."""

from __future__ import annotations

from pellucid.cli.target import Target, target_command

_WRITES = ("FOLDER", "Write the tests to FOLDER/tests. Default: a new folder.")


@target_command("pellucid testgen run -o kernels", metavar="TARGET [KERNEL]...", writes=_WRITES)
def testgen(target: Target) -> None:
    """Write a standalone test for every kernel of TARGET, or for each KERNEL named after it.

    A test contains the small FX graph that its kernel implements, with the inputs that it has in the program. Exits
    with 1 if no test could be written for a kernel.
    """
    from pellucid.kit.debug.testgen import testgen as run

    request = target.request(takes_more=True)
    folder = target.run_of(request.target) / "tests"
    target.finish(run(request, folder, target.more, target.seconds, target.memory))
