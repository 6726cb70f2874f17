"""`etude retrieve`: builds a search index, queries it, and serves it over HTTP or, as `query_rag`, over MCP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import click

from etude.cli.listening import limit, listening, protected

_Find: TypeAlias = Callable[[str, int], Awaitable[Any]]
_corpus = click.option("--corpus", type=click.Path(path_type=Path), help="The corpus file, where it was moved.")
_device = click.option("--device", help="Of the encoder, such as cuda; default the library's choice.")


@click.group()
def retrieve() -> None:
    """Search a collection of passages."""


@retrieve.command()
@click.argument("corpus", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder of the index.")
@click.option("--method", type=click.Choice(["bm25", "dense", "hybrid"]), default="bm25", show_default=True)
@click.option("--k1", default=0.9, show_default=True, help="BM25: how soon a repeated word stops counting.")
@click.option("--b", default=0.4, show_default=True, help="BM25: how much long passages are discounted, 0 to 1.")
@click.option("--stopwords", type=click.Choice(["english", "none"]), default="english", show_default=True)
@click.option("--stemmer", default="english", show_default=True, help="A Snowball language, or none.")
@click.option("--model", help="dense, hybrid: a sentence-transformers model, such as intfloat/e5-base-v2.")
@click.option("--factory", default="Flat", show_default=True, help="dense, hybrid: FAISS's index string.")
@click.option("--query-prefix", help="dense, hybrid: before each query; default that of e5 and bge models.")
@click.option("--passage-prefix", help="dense, hybrid: before each passage.")
@click.option("--max-tokens", default=256, show_default=True, help="dense, hybrid: of a passage; more is cut.")
@click.option("--batch-size", default=64, show_default=True, help="dense, hybrid: passages the encoder takes at once.")
@_device
@click.option("--replace", is_flag=True, help="Replace an index that is there.")
def build(corpus: Path, output: Path, replace: bool, **options: Any) -> None:
    """Index CORPUS, a JSON-lines file of {id, contents} or {id, title, text}.

    A build that was interrupted goes on where it was. The index refers to the corpus file, which must stay as it is.

    \b
    Example:
      etude retrieve build wiki-18.jsonl --output indexes/wiki-18
    """
    from etude.retrieval import BuildOptions, build_index

    def progress(stage: str, done: int, total: int) -> None:
        click.echo(f"{stage} {done:,} of {total:,} passages" if total else f"{stage} {corpus}", err=True)

    built = build_index(corpus, output, BuildOptions(**options), replace=replace, progress=progress)
    size = sum(file.stat().st_size for file in built.iterdir())
    click.echo(f"{built}  {size / 2**20:,.1f} MiB")


@retrieve.command()
@click.argument("index", type=click.Path(path_type=Path))
@listening(8000)
@limit("--topk", 3, "Passages where a request says none.")
@limit("--max-topk", 100, "Most passages per query.")
@limit("--max-queries", 4096, "Queries of one request.")
@limit("--max-query-chars", 8192, "Longest query.")
@limit("--max-passages", 20_000, "Queries x topk of one request.")
@limit("--max-waiting", 20_000, "Queries that may wait.")
@limit("--max-request-mb", 8, "Largest request.")
@protected("ETUDE_RETRIEVAL_TOKEN")
@_corpus
@_device
def serve(
    index: Path,
    host: str,
    port: int,
    allow_hosts: tuple[str, ...],
    token: str | None,
    grace: float,
    corpus: Path | None,
    device: str | None,
    **limits: int,
) -> None:
    """Serve INDEX: POST /retrieve as Search-R1, GET /search for web search tools.

    Further pages: /health, /metrics (Prometheus).
    """
    from etude.retrieval import Retriever
    from etude.retrieval.server import ServerOptions, create_app
    from etude.serving.listening import serve as serve_until_stopped

    retriever = Retriever(index, corpus, device)

    def ready(url: str) -> None:
        click.echo(f"{url}/retrieve  {retriever.options.method}, {len(retriever):,} passages (Ctrl-C stops)")

    app = create_app(retriever, ServerOptions(token=token, **limits))
    asyncio.run(serve_until_stopped(app, host, port, grace=grace, ready=ready, allow_hosts=allow_hosts))


@retrieve.command()
@click.argument("index", type=click.Path(path_type=Path))
@click.argument("query")
@limit("--topk", 3, "Passages.")
@_corpus
@_device
def search(index: Path, query: str, topk: int, corpus: Path | None, device: str | None) -> None:
    """Print the best passages of INDEX for QUERY."""
    from etude.retrieval import Retriever

    retriever = Retriever(index, corpus, device)
    for row, score in retriever.search([query], topk)[0]:
        document = retriever.corpus.document(row)
        click.echo(f"{score:8.3f}  {document['id']}  {' '.join(document['contents'].split())[:200]}")


@retrieve.command()
@click.argument("source")
@click.option(
    "--transport",
    type=click.Choice(["stdio", "streamable-http"]),
    default="stdio",
    show_default=True,
    help="As MCP names it.",
)
@listening(8000, only="streamable-http")
@click.option("--path", default="/mcp", show_default=True, help="Path of the endpoint (streamable-http).")
def mcp(source: str, transport: str, host: str, port: int, allow_hosts: tuple[str, ...], path: str) -> None:
    """Serve `query_rag(query, topk)` to MCP clients, from SOURCE: an index folder, or the address of a `/retrieve` service.

    \b
    Example, in an mcp_tools.pydata:
      {'mcpServers': {'rag': {'command': 'etude', 'args': ['retrieve', 'mcp', 'indexes/wiki-18']}}}
    """
    from etude.cli.tools import serve_mcp
    from etude.retrieval.server import ServerOptions
    from etude.tools import FunctionTool
    from etude.tools.builtin.web_search import check_query

    bounds = ServerOptions()
    find = _at_service(source) if source.startswith(("http://", "https://")) else _in_index(Path(source))

    async def query_rag(query: str, topk: int = 3) -> str:
        """Searches the collection and returns the best passages as JSON.

        Args:
            query: what to search for
            topk: how many passages
        """
        found = await find(check_query(query, bounds.max_query_chars), max(1, min(topk, bounds.max_topk)))
        return json.dumps(found, ensure_ascii=False)

    serve_mcp([FunctionTool(query_rag)], {}, transport, host, port, path, allow_hosts)


def _in_index(folder: Path) -> _Find:
    from etude.retrieval import Retriever

    retriever = Retriever(folder)

    async def find(query: str, topk: int) -> Any:
        hits = (await asyncio.to_thread(retriever.search, [query], topk))[0]
        return {"result": [[{"document": retriever.corpus.document(row), "score": score} for row, score in hits]]}

    return find


def _at_service(url: str) -> _Find:
    from etude.serving.json_service import JsonService

    service = JsonService(url)

    async def find(query: str, topk: int) -> Any:
        body = {"queries": [query], "topk": topk, "return_scores": True}
        return await service.request("POST", body=body, seconds=30)

    return find
