"""`check_template` and `etude chat check`: what they find in good templates, and that they find what is wrong."""

import copy

import pytest
from test_chat_template import CHATML, FAMILIES, LLAMA3, TINY, family, tokenizer_with

from etude.chat.check import check_template
from etude.chat.control import ControlTokens
from etude.cli.main import cli, run
from etude.trajectory import Provenance

NO_TOOLS = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}",
)


def finding(report, words):
    return next(found for found in report.findings if words in found.statement)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_exact_templates_are_found_exact(name):
    report = check_template(family(name))
    assert finding(report, "user's answer").holds
    assert finding(report, "tool's answer").holds
    assert finding(report, "two tools'").holds is (name != "strict")  # it wants each to follow a call
    assert finding(report, "cannot write a control token").holds


def test_the_packages_own_template_is_safe_and_its_format_known():
    report = check_template(copy.deepcopy(TINY))
    assert report.safe
    assert finding(report, "format=auto").evidence == "hermes"


def test_the_example_is_a_conversation_by_provenance():
    report = check_template(copy.deepcopy(TINY))
    assert [p for _, p in report.example if p is Provenance.SAMPLED] == [Provenance.SAMPLED] * 2
    assert any(p is Provenance.TOOL for _, p in report.example)


def test_a_template_without_tools_says_so():
    report = check_template(tokenizer_with(CHATML))
    assert finding(report, "tool schemas").holds is False
    assert not report.safe


def test_a_template_without_a_tool_role_says_so():
    report = check_template(tokenizer_with(NO_TOOLS))
    assert finding(report, "a tool's answer").holds is False
    assert "no tools" in finding(report, "a tool's answer").evidence
    assert finding(report, "user's answer").holds


def test_a_template_that_cannot_be_continued_is_refused_with_start_ups_sentence():
    broken = tokenizer_with("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    report = check_template(broken)
    assert not report.safe
    assert "does not close" in report.findings[0].evidence
    assert report.example == []


def test_dropped_reasoning_is_told():
    drops = CHATML.replace("m.content +", "(m.content.split('</think>')[-1] if not loop.last else m.content) +")
    assert "drops it" in finding(check_template(tokenizer_with(drops)), "earlier reasoning").evidence
    assert "keeps it" in finding(check_template(tokenizer_with(CHATML)), "earlier reasoning").evidence


def test_a_forged_token_would_be_found(monkeypatch):
    """The trial itself works: with the guard taken away it fails."""
    monkeypatch.setattr(ControlTokens, "cut", lambda self, value: value)
    report = check_template(
        tokenizer_with(
            LLAMA3, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"
        )
    )
    assert finding(report, "cannot write a control token").holds is False


def test_the_command(tmp_path, capsys):
    copy.deepcopy(TINY).save_pretrained(tmp_path / "good")
    assert run(cli, ["chat", "check", str(tmp_path / "good")]) == 0
    out = capsys.readouterr().out
    assert "safe for training" in out
    assert "✗" not in out
    assert "·9·" in out
    tokenizer_with(CHATML).save_pretrained(tmp_path / "bad")
    assert run(cli, ["chat", "check", str(tmp_path / "bad"), "--no-tokens"]) == 1
    assert "NOT safe" in capsys.readouterr().out


def test_the_command_tries_the_template_as_it_will_be_rendered(tmp_path, capsys):
    thinking = CHATML.replace(
        "assistant\n' }}{%", "assistant\n' }}{% if not thinks %}{{ raise_exception('set thinks') }}{% endif %}{%"
    )
    tokenizer_with(thinking).save_pretrained(tmp_path / "model")
    model = str(tmp_path / "model")
    assert run(cli, ["chat", "check", model, "--no-tokens"]) == 1
    assert "set thinks" in capsys.readouterr().out
    assert run(cli, ["chat", "check", model, "--no-tokens", "--set", "thinks=true"]) == 1
    assert "set thinks" not in capsys.readouterr().out
    for wrong in ("thinks", "=1", "a b=1", "thinks={"):
        assert run(cli, ["chat", "check", model, "--set", wrong]) == 2
        assert "give KEY=VALUE" in capsys.readouterr().err
