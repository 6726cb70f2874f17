"""What stands in this folder is at hand for the folders below it, too: pytest puts a conftest's folder on the path."""
