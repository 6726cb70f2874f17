"""`WebSearchTool`: searches the web through an HTTP API.

Invariant: a search that gets a response costs `cost`, whatever its results; one without a response is an infrastructure
failure and costs nothing. The model gets at most `max_results` results, their titles and snippets truncated to
`max_snippet_chars`.

`ENGINES` follows the services' public documentation; any other service with JSON responses is described by the same keys in
the tool's `config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from etude.errors import InfrastructureError, ToolError
from etude.options.types import Count, NonNegative
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.serving.json_service import JsonService
from etude.tools.base import Execution, StatefulTool, function_schema
from etude.tools.options import CallPolicy, HttpUrl, ToolOptions, read_options
from etude.trace import rollout_trace_op

_SCHEMA = function_schema(
    "web_search",
    "Searches the web and returns the titles and summaries of the first results.",
    ["query"],
    query={"type": "string", "description": "What to search for"},
)

ENGINES: dict[str, dict[str, str]] = {
    "serper": {
        "url": "https://google.serper.dev/search",
        "method": "POST",
        "results": "organic",
        "auth_header": "X-API-KEY",
        "auth_prefix": "",
    },
    "brave": {
        "url": "https://api.search.brave.com/res/v1/web/search",
        "count_key": "count",
        "results": "web.results",
        "snippet_key": "description",
        "auth_header": "X-Subscription-Token",
        "auth_prefix": "",
    },
    "tavily": {
        "url": "https://api.tavily.com/search",
        "method": "POST",
        "query_key": "query",
        "count_key": "max_results",
        "results": "results",
        "snippet_key": "content",
    },
    "searxng": {"url": "http://127.0.0.1:8888/search?format=json", "results": "results", "snippet_key": "content"},
}
"""Defaults of `config` for these engines; keys that `config` sets take precedence."""


class WebSearchOptions(ToolOptions):
    """`config` of `web_search`. `{engine}` in `url` is replaced by the engine's name.

    `results` is the dotted path of the list of results, empty where the answer is that list. `auth_header` carries
    `auth_prefix` and the key. A `GET` sends its arguments in the address, a `POST` in a JSON body.
    """

    engine: str = "google"
    api_key: str | None = Field(default=None, repr=False)
    cost: NonNegative = 0.01
    max_results: int = Field(default=5, ge=1, le=50)
    max_query_chars: Count = 500
    max_snippet_chars: Count = 500
    max_body_bytes: Count = 4_000_000
    connections: Count = 100
    url: HttpUrl = "https://api.{engine}.com/search"
    method: Literal["GET", "POST"] = "GET"
    query_key: str = "q"
    count_key: str = "num"
    results: str = ""
    title_key: str = "title"
    snippet_key: str = "snippet"
    auth_header: str = "Authorization"
    auth_prefix: str = "Bearer "


@dataclass
class SearchState:
    """The searches of one trajectory."""

    search_history: list[dict[str, Any]] = field(default_factory=list)
    total_calls: int = 0


class WebSearchTool(StatefulTool[SearchState]):
    """`execute_kwargs`: `timeout` (seconds per request) and `max_results`; the defaults are in the configuration."""

    name = "web_search"
    schema = _SCHEMA

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        """Raises ConfigError if an option is invalid."""
        super().__init__(config, tool_schema)
        own = {key: value for key, value in config.items() if value is not None}
        known = ENGINES.get(str(own.get("engine")), {})
        self._options = options = read_options(WebSearchOptions, {**known, **own}, self.name)
        self._service = JsonService(
            options.url.replace("{engine}", options.engine),
            connections=options.connections,
            max_body_bytes=options.max_body_bytes,
            headers={options.auth_header: f"{options.auth_prefix}{options.api_key}"} if options.api_key else {},
        )
        self._timeout = CallPolicy.from_config(config, self.name).timeout

    async def begin(self, **create_kwargs: Any) -> SearchState:
        """Returns the state of a trajectory without searches."""
        return SearchState()

    @rollout_trace_op
    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        timeout: float | None = None,
        max_results: int | None = None,
        **execute_kwargs: Any,
    ) -> Execution:
        """Returns the first results for `parameters["query"]`, one per line; the step reward is minus `cost`.

        Raises:
            ToolError: the query is empty or too long, or the service rejects it.
            InfrastructureError: the service's response is missing or invalid.
        """
        query = check_query(parameters.get("query"), self._options.max_query_chars)
        wanted = min(max_results or self._options.max_results, self._options.max_results)
        arguments = {self._options.query_key: query, self._options.count_key: wanted}
        if self._options.method == "GET":
            params = {key: str(value) for key, value in arguments.items()}
            answer = await self._service.request("GET", params=params, seconds=timeout or self._timeout)
        else:
            answer = await self._service.request("POST", body=arguments, seconds=timeout or self._timeout)
        results = self._results(answer)[:wanted]
        state = self._instance_dict[instance_id]
        state.search_history.append({"query": query, "results": results})
        state.total_calls += 1
        metrics = {"num_results": len(results), "total_calls": state.total_calls}
        return ToolResponse(text=self._format_results(results)), -self._options.cost, metrics

    def _results(self, answer: Any) -> list[dict[str, Any]]:
        for key in filter(None, self._options.results.split(".")):
            if isinstance(answer, dict) and key not in answer:
                return []  # several services omit an empty list
            answer = answer[key] if isinstance(answer, dict) else None
        if not isinstance(answer, list):
            place = f"at '{self._options.results}'" if self._options.results else "in its answer"
            raise InfrastructureError(f"{self._service.host} gave no list of results {place}; check config.results")
        return [result for result in answer if isinstance(result, dict)]

    def _format_results(self, results: list[dict[str, Any]]) -> str:
        if not results:
            return "Search results:\nnone"
        keys, limit = (self._options.title_key, self._options.snippet_key), self._options.max_snippet_chars
        pairs = [[" ".join(str(result.get(key) or "").split())[:limit] for key in keys] for result in results]
        return "Search results:\n" + "\n".join(f"{n}. {title}: {text}" for n, (title, text) in enumerate(pairs, 1))


def check_query(query: object, max_chars: int) -> str:
    """Validates `query` and returns it without surrounding whitespace.

    Raises:
        ToolError: the query is not a string, is empty, or is longer than `max_chars`.
    """
    if not isinstance(query, str) or not query.strip():
        raise ToolError("Error: the query must be a text that is not empty")
    if len(query) > max_chars:
        raise ToolError(f"Error: a query may have {max_chars} characters")
    return query.strip()
