"""Runs the quickstart and the other examples: provides data and configuration, and uses the same code as any run."""

from etude.quickstart.service import run_service

__all__ = ["run_service"]
