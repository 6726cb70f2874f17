"""Builds parquet files: a generated arithmetic task, and public data sets as rows whose tools come along."""
