"""What a finding advises names what is there."""

from etude.options import CustomRewardOptions
from etude.options.rollout import MultiTurnOptions
from etude.testing import advice


def test_the_file_of_a_tool_is_looked_for_among_files_and_modules(tmp_path):
    for name in ("ask", "sum"):
        (tmp_path / f"{name}.yaml").write_text(f"tools: [{{name: {name}}}]")
    files = tuple(str(tmp_path / f"{name}.yaml") for name in ("ask", "sum"))
    talks = MultiTurnOptions(tool_config_path=files, function_tool_path=("json", "some.module"))
    assert advice.tool_file(talks, "sum") == files[1]
    assert advice.tool_file(talks, "elsewhere") == advice.TOOL_FILES
    assert advice.tool_file(MultiTurnOptions(function_tool_path=("json",)), "elsewhere") == "json"


def test_what_a_judge_pays_is_said_in_its_rubric():
    judge = CustomRewardOptions(path="etude.rewards.judge")
    assert advice.scorer(judge) == "the judge (custom_reward_function.reward_kwargs.rubric)"
    assert advice.scorer(CustomRewardOptions(path="mine.py")) == "compute_score in mine.py"
