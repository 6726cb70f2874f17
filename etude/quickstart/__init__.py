"""The quickstart: data and configuration for a first run; the work is done by the same code as any run's."""
