"""What tests of commands share."""

import pytest

from tests.conftest import compiled_quickly


@pytest.fixture
def quick_compilation():
    with compiled_quickly():
        yield
