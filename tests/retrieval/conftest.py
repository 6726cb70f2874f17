"""The small index for all tests of this folder."""

from retrieval_stage import index  # noqa: F401
