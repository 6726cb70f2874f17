"""`Engine`: how a web search service is asked, and where its results stand in the answer.

The services below are described by their public documentation; any other that answers a query with JSON is described
by the same fields in the tool's `config`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """One search API; `{engine}` in `url` stands for the engine's name.

    `results` is the dotted path of the list of results, empty where the answer is that list. `auth_header` carries
    `auth_prefix` and the key. A `GET` has its arguments in the address, a `POST` in a JSON body.
    """

    url: str = "https://api.{engine}.com/search"
    method: str = "GET"
    query_key: str = "q"
    count_key: str = "num"
    results: str = ""
    title_key: str = "title"
    snippet_key: str = "snippet"
    auth_header: str = "Authorization"
    auth_prefix: str = "Bearer "


ENGINES = {
    "serper": Engine(
        url="https://google.serper.dev/search",
        method="POST",
        results="organic",
        auth_header="X-API-KEY",
        auth_prefix="",
    ),
    "brave": Engine(
        url="https://api.search.brave.com/res/v1/web/search",
        count_key="count",
        results="web.results",
        snippet_key="description",
        auth_header="X-Subscription-Token",
        auth_prefix="",
    ),
    "tavily": Engine(
        url="https://api.tavily.com/search",
        method="POST",
        query_key="query",
        count_key="max_results",
        results="results",
        snippet_key="content",
    ),
    "searxng": Engine(
        url="http://127.0.0.1:8888/search?format=json",
        results="results",
        snippet_key="content",
    ),
}
"""Engines that a name alone describes; any other name has the form of `Engine()`."""
