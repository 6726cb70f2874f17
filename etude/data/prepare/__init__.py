"""Builds parquet files: a generated arithmetic task, and public datasets as rows with their tools."""
