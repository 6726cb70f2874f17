"""Files of rows, and `etude data` as a test calls it."""

import json

from click.testing import CliRunner

from etude.cli.data import data


def lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def invoke(*arguments):
    """The result of `etude data arguments…`; what it raises goes on."""
    result = CliRunner().invoke(data, [str(argument) for argument in arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result
