"""`SearchTool`: retrieves passages from a `/retrieve` service as defined by Search-R1.

Invariant: the queries of one call are sent in one request, and their results are returned in order. The model gets the JSON
`{"result": text}`, or the text alone with `result_format: text`: each passage as `Doc 1 (Title: …)` and its text, the
results of several queries separated by a line `---`. Retries are left to `ToolRuntime`.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from etude.errors import ConfigError, InfrastructureError, ToolError
from etude.options.types import Count
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.serving.json_service import JsonService
from etude.tools.base import BaseTool, Execution, function_schema
from etude.tools.builtin.web_search import check_query
from etude.tools.options import CallPolicy, HttpUrl, ToolOptions, read_options
from etude.trace import rollout_trace_op

NOTHING_FOUND = "No search results found."
_SEPARATOR = "\n---\n"
_SCHEMA = function_schema(
    "search",
    "Searches a collection of documents and returns the best passages for each query.",
    ["query_list"],
    query_list={
        "type": "array",
        "items": {"type": "string"},
        "description": "One or more complete queries, each answered by itself",
    },
)


class SearchOptions(ToolOptions):
    """`config` of `search`; the smaller of `num_workers` and `rate_limit` is the number of requests at once."""

    retrieval_service_url: HttpUrl
    topk: int = Field(default=3, ge=1, le=100)
    num_workers: Count = 120
    rate_limit: Count = 120
    max_queries: Count = 8
    max_query_chars: Count = 1000
    max_body_bytes: Count = 8_000_000
    result_format: Literal["json", "text"] = "json"


class SearchTool(BaseTool):
    """The argument is `query_list`, or `query` if the configured schema says so. `execute_kwargs`: `timeout`, `topk`."""

    name = "search"
    schema = _SCHEMA

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        """Raises ConfigError if the service's URL is missing, or an option is invalid."""
        super().__init__(config, tool_schema)
        if not config.get("retrieval_service_url"):
            raise ConfigError(
                "tool 'search': config.retrieval_service_url is missing; set the address of a search service, such as "
                "http://127.0.0.1:8000/retrieve"
            )
        self._options = read_options(SearchOptions, config, self.name)
        self._service = JsonService(
            self._options.retrieval_service_url,
            connections=min(self._options.num_workers, self._options.rate_limit),
            max_body_bytes=self._options.max_body_bytes,
        )
        self._timeout = CallPolicy.from_config(config, self.name).timeout

    @rollout_trace_op
    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        timeout: float | None = None,
        topk: int | None = None,
        **execute_kwargs: Any,
    ) -> Execution:
        """Returns the best passages for every query, as one text; step reward 0.0.

        Raises:
            ToolError: there is no query, or the queries are too many or too long.
            InfrastructureError: the service's response is missing or invalid.
        """
        queries = self._queries(parameters)
        body = {"queries": queries, "topk": topk or self._options.topk, "return_scores": True}
        answer = await self._service.request("POST", body=body, seconds=timeout or self._timeout)
        found = self._results(answer, len(queries))
        text = _SEPARATOR.join(passages_text(passages) or NOTHING_FOUND for passages in found)
        if self._options.result_format == "json":
            text = json.dumps({"result": text}, ensure_ascii=False)
        metrics = {"query_count": len(queries), "status": "success", "total_results": sum(map(len, found))}
        return ToolResponse(text=text), 0.0, metrics

    def _queries(self, parameters: dict[str, Any]) -> list[str]:
        given = parameters.get("query_list", parameters.get("query"))
        queries = [given] if isinstance(given, str) else given
        if not isinstance(queries, list) or not queries:
            raise ToolError("Error: 'query_list' must be a list with at least one query")
        if len(queries) > self._options.max_queries:
            raise ToolError(f"Error: a call may have {self._options.max_queries} queries, not {len(queries)}")
        return [check_query(query, self._options.max_query_chars) for query in queries]

    def _results(self, answer: Any, count: int) -> list[list[Any]]:
        found = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(found, list) or len(found) != count or not all(isinstance(each, list) for each in found):
            raise InfrastructureError(f"{self._service.host} gave no list of passages for each of {count} queries")
        return found


def passages_text(passages: list[Any]) -> str:
    """Formats the passages of one query; the first line of a passage's contents is its title."""
    return "\n\n".join(_passage_text(passage, number) for number, passage in enumerate(passages, 1)).strip()


def _passage_text(passage: Any, number: int) -> str:
    document = passage.get("document", passage) if isinstance(passage, dict) else None
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(contents, str):
        raise InfrastructureError("the search service gave a passage without 'contents'")
    title, _, text = contents.partition("\n")
    return f"Doc {number} (Title: {title})\n{text}"
