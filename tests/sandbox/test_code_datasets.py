"""Two public sets of programming problems: reference solutions pass their tests, and an empty answer fails them."""

import asyncio
import json
from pathlib import Path

import pytest

from etude.sandbox import Executor, Limits, RunRequest, RunStatus

DATA = Path(__file__).parents[3] / "shared" / "data"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not beside this checkout"),
]


def rows(path):
    return [json.loads(line) for line in (DATA / path).read_text(encoding="utf-8").splitlines()]


def humaneval():
    for row in rows("humaneval/HumanEval.jsonl"):
        for answer, passes in ((row["canonical_solution"], True), ("    pass\n", False)):
            check = f"{row['prompt']}{answer}\n{row['test']}\ncheck({row['entry_point']})\n"
            yield row["task_id"], check, passes


def mbpp():
    for row in rows("mbpp/mbpp_sanitized.jsonl"):
        tests = "\n".join([row["test_setup_code"], row.get("extra_import", ""), *row["test_list"]])
        for answer, passes in ((row["code"], True), ("pass", False)):
            yield row["task_id"], f"{answer}\n{tests}\n", passes


@pytest.mark.parametrize(("problems", "count"), [(humaneval, 164), (mbpp, 427)], ids=["HumanEval", "MBPP"])
def test_reference_solutions_pass_and_empty_ones_fail(problems, count):
    async def run_all():
        limits = Limits(wall_seconds=60, cpu_seconds=60)
        async with await Executor.open(workers=4) as executor:

            async def one(name, code, passes):
                result = await executor.run(RunRequest(code, limits=limits))
                return name, passes, result

            return await asyncio.gather(*(one(*problem) for problem in problems()))

    results = asyncio.run(run_all())
    assert len(results) == 2 * count
    wrong = [
        (name, passes, result.status, result.stderr[-300:])
        for name, passes, result in results
        if result.status is not RunStatus.FINISHED or (result.return_code == 0) != passes
    ]
    assert wrong == []
