"""A judge behind an OpenAI-compatible endpoint: it scores a shop's reply to a customer, from 0 to 10.

    python judge.py [PORT]        0, the default: any that is free; prints the address

It stands in for a language model, so that the example costs nothing and ends the same everywhere: what it is asked and how
it answers is what a real one would read and write. To be judged by one, give its address and its name instead; agent.yaml
has the rubric.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

QUESTION = re.compile(r"<question>\nI am (\w+)\. My (\w+) is broken\.\n</question>")
ANSWER = re.compile(r"<answer>\n(.*)\n</answer>", re.DOTALL)


def judge(prompt: str) -> str:
    """What the judge says to the prompt of `etude.rewards.judge`."""
    (name, article), answer = QUESTION.search(prompt).groups(), ANSWER.search(prompt)[1]
    marks = {
        "It greets the customer by name.": 3 * answer.startswith(f"Dear {name},"),
        "It says what is broken.": 3 * (f"your {article}" in answer),
        "It is sorry.": 2 * ("sorry" in answer),
        "It offers help.": 2 * answer.endswith("We will help you."),
    }
    praise = " ".join([text for text, points in marks.items() if points])
    return praise + "\n" + json.dumps({"score": sum(marks.values())})


class Handler(BaseHTTPRequestHandler):
    """`POST /v1/chat/completions`, as OpenAI's interface has it."""

    protocol_version = "HTTP/1.1"  # connections stay open

    def do_POST(self) -> None:
        """Answers one request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._send(404, {"error": {"message": f"no {self.path}"}})
            return
        prompt = body["messages"][-1]["content"]
        said = judge(prompt)
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(said.split())}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        self._send(200, {"object": "chat.completion", "model": body["model"], "choices": [choice], "usage": usage})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()
