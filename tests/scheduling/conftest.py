"""What tests of scheduling share."""

from tests.decoding.conftest import quick_compilation

__all__ = ["quick_compilation"]
