"""Builds parquet files: a generated arithmetic task, and GSM8K from its public JSON lines."""
