"""A calculator that acts up on request, and the YAML that configures it, for runs in this process and in others."""

SOURCE = '''
"""A calculator that is well at first, and then acts up; what happens to it is written down, a word a line."""

import asyncio
import pathlib

from etude.tools.builtin.calculator import Calculator

LOG = pathlib.Path({log!r})
created = 0


def note(word):
    with LOG.open("a") as file:
        file.write(word + "\\n")


class Moody(Calculator):
    async def create(self, instance_id=None, **kwargs):
        global created
        created += 1
        note("create")
        return await super().create(f"{{created}}", **kwargs)

    async def execute(self, instance_id, parameters, **kwargs):
        if int(instance_id) > {good}:
            note("mood")
            {mood}
        return await super().execute(instance_id, parameters, **kwargs)

    async def release(self, instance_id, **kwargs):
        note("release")
'''
YAML = """
tools:
  - class_name: {path}:Moody
    config: {{type: native, timeout: {timeout}}}
    tool_schema:
      type: function
      function:
        name: calculator
        parameters: {{type: object, properties: {{expression: {{type: string}}}}, required: [expression]}}
"""

STUBBORN = """import etude.timeouts
            etude.timeouts.GRACE_SECONDS = 0.5  # to clean up
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    note("ignored")"""
"""A mood that ignores its cancellation."""


class Moody:
    """Files of the tool in `folder`: from its instance `good` + 1 on, `execute` runs the statement `mood`."""

    def __init__(self, folder, mood, *, good=8, timeout=60):
        folder.mkdir(exist_ok=True)
        self.log, code, self.yaml = folder / "tool.log", folder / "moody.py", folder / "moody.yaml"
        code.write_text(SOURCE.format(log=str(self.log), good=good, mood=mood))
        self.yaml.write_text(YAML.format(path=code, timeout=timeout))

    @property
    def override(self):
        return f"actor_rollout_ref.rollout.multi_turn.tool_config_path={self.yaml}"

    def count(self, word):
        return self.log.read_text().split().count(word) if self.log.exists() else 0
