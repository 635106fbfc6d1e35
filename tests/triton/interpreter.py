"""Triton's interpreter, two to three times faster and with the same results."""
from __future__ import annotations

import dataclasses

from triton.runtime import interpreter


def hasten() -> None:
    """For a process that does nothing with Triton but interpret; once is enough."""
    # Overflow checks double the time, and integer overflow is not what these tests look for.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # Every launch and every call of a device function replaces all of triton.language by NumPy, a millisecond each time, and
    # the end of a launch undoes it. Here each module of kernels has it replaced once, and it stays so.
    replace, done = interpreter._patch_lang, set()

    def replace_once(function):
        if id(function.__globals__) not in done:
            replace(function)
            done.add(id(function.__globals__))
        return interpreter._LangPatchScope()                # of no changes, so that nothing is undone

    interpreter._patch_lang = replace_once
