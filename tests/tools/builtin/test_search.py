"""`search` against a real `/retrieve` service: the request, the passages as text, and what each failure means."""

import json

import pytest
from aiohttp import web

from etude.errors import ConfigError, InfrastructureError, ToolError
from etude.tools import builtin_config, load_tools
from etude.tools.builtin.search import SearchTool, passages_text


def retriever(asked):
    async def handler(request):
        body = await request.json()
        asked.append((request.method, body))
        found = [
            [
                {
                    "document": {"id": str(n), "contents": f'"Title {n}"\n{query}, line one\nline two'},
                    "score": 1 / (n + 1),
                }
                for n in range(body["topk"])
            ]
            for query in body["queries"]
        ]
        return web.json_response({"result": found})

    return handler


async def found(made, parameters, **kwargs):
    instance_id, _ = await made.create(None)
    try:
        return await made.execute(instance_id, parameters, **kwargs)
    finally:
        await made.release(instance_id)


async def test_several_queries_travel_in_one_request(serve):
    asked = []
    made = SearchTool({"retrieval_service_url": await serve(retriever(asked), "/retrieve"), "topk": 2})
    response, reward, metrics = await found(made, {"query_list": ["who", " where "]})
    assert asked == [("POST", {"queries": ["who", "where"], "topk": 2, "return_scores": True})]
    one = 'Doc 1 (Title: "Title 0")\nwho, line one\nline two\n\nDoc 2 (Title: "Title 1")\nwho, line one\nline two'
    assert json.loads(response.text) == {"result": f"{one}\n---\n{one.replace('who', 'where')}"}
    assert (reward, metrics) == (0.0, {"query_count": 2, "status": "success", "total_results": 4})


async def test_one_query_as_text_and_the_rows_own_topk(serve):
    asked = []
    config = {"retrieval_service_url": await serve(retriever(asked), "/retrieve"), "result_format": "text"}
    response, _, _ = await found(SearchTool(config), {"query": "北京"}, topk=1)
    assert response.text == 'Doc 1 (Title: "Title 0")\n北京, line one\nline two'
    assert asked[0][1] == {"queries": ["北京"], "topk": 1, "return_scores": True}


async def test_no_passages(serve):
    async def handler(request):
        return web.json_response({"result": [[]]})

    made = SearchTool({"retrieval_service_url": await serve(handler), "result_format": "text"})
    assert (await found(made, {"query_list": ["x"]}))[0].text == "No search results found."


def test_passages_without_a_document_around_them():
    assert passages_text([{"contents": "Title only"}]) == "Doc 1 (Title: Title only)"


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"query_list": []},
        {"query_list": [""]},
        {"query_list": [1]},
        {"query_list": ["x"] * 9},
        {"query": "x" * 1001},
    ],
)
async def test_queries_that_make_no_sense_are_told(parameters):
    with pytest.raises(ToolError):
        await found(SearchTool({"retrieval_service_url": "http://127.0.0.1:9/retrieve"}), parameters)


@pytest.mark.parametrize(
    "answer",
    [[], {"result": None}, {"result": [[], []]}, {"result": ["x"]}, {"result": [[{"document": {"text": "x"}}]]}],
)
async def test_an_answer_of_another_shape_is_infrastructure(serve, answer):
    async def handler(request):
        return web.json_response(answer)

    with pytest.raises(InfrastructureError):
        await found(SearchTool({"retrieval_service_url": await serve(handler)}), {"query_list": ["x"]})


async def test_a_dead_service_is_infrastructure():
    with pytest.raises(InfrastructureError, match="not reachable"):
        await found(SearchTool({"retrieval_service_url": "http://127.0.0.1:9/retrieve"}), {"query_list": ["x"]})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "config.retrieval_service_url is missing; set the address"),
        ({"retrieval_service_url": "host/retrieve"}, "must be an address"),
        ({"retrieval_service_url": "http://h/retrieve", "top_k": 3}, "did you mean 'topk'"),
    ],
)
def test_options_are_checked(config, reason):
    with pytest.raises(ConfigError, match=reason):
        SearchTool(config)


def test_the_example_configuration(monkeypatch):
    monkeypatch.setenv("RETRIEVAL_SERVICE_URL", "http://10.0.0.1:8000/retrieve")
    (made,) = load_tools(builtin_config("search"))
    assert made._service.url == "http://10.0.0.1:8000/retrieve"
    assert made.tool_schema.to_openai()["function"]["parameters"]["properties"]["query_list"]["items"] == {
        "type": "string"
    }


def test_a_configuration_made_for_verl():
    made = SearchTool(
        {"retrieval_service_url": "http://h/retrieve", "num_workers": 120, "rate_limit": 60, "timeout": 30}
    )
    assert made._service._connections == 60
