"""The quickstart and other examples: data and configuration; the work is done by the same code as any run's."""

from etude.quickstart.service import run_service

__all__ = ["run_service"]
