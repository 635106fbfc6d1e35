"""Settings that hold for every test: one CPU thread, so that results do not depend on the machine."""

from __future__ import annotations

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    # Tests spell the argument `past_key_values=`, the name that works in every supported version; 5.24
    # deprecates it.
    config.addinivalue_line("filterwarnings", "ignore:.*past_key_values. is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test starts from the same global random state, whatever ran before it."""
    torch.manual_seed(0)

# Triton decides at its own import whether kernels are interpreted, so these run in a process of their own
# (tests/test_triton_kernels.py starts it).
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["triton"]


def _interpreted(items: list[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if item.name == "test_kernels_in_the_interpreter"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    last = _interpreted(items)
    items[:] = [item for item in items if item not in last] + last


def pytest_collection_finish(session: pytest.Session) -> None:
    if _interpreted(session.items) and not session.config.option.collectonly:
        from .test_triton_kernels import start
        start()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _interpreted(getattr(session, "items", [])):
        from .test_triton_kernels import stop
        stop()
