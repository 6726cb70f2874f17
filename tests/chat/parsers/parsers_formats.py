"""How a model writes calls in each format: the other direction of the parsers, for their tests."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from etude.chat import ToolParser

Calls = list[tuple[str, dict]]


def to_json(value):
    return json.dumps(value, ensure_ascii=False)


def as_text(value):
    """A value as formats without quotes write it."""
    return value if isinstance(value, str) else to_json(value)


@dataclass(frozen=True)
class Format:
    """`name` of the parser; `opening`: what shows that a call was begun; `unsayable`: what its texts cannot hold;
    `uncuttable`: what a text that is cut short cannot hold, since an argument that is not closed ends there."""

    name: str
    render: Callable[[Calls], str]
    opening: str
    unsayable: tuple[str, ...] = ()
    around: bool = True  # whether words may stand before the calls
    lenient: bool = False  # whether a call that is cut short may be read
    uncuttable: tuple[str, ...] = ()
    trims: bool = False  # whether a line break at the edge of a text is lost


def each(render):
    return lambda calls: "\n".join(render(name, arguments) for name, arguments in calls)


def element(call, argument, end):
    def render(name, arguments):
        return call(name) + "".join(argument(key, as_text(value)) for key, value in arguments.items()) + end

    return render


def gemma(mark):
    def value(given):
        if isinstance(given, str):
            return f"{mark}{given}{mark}"
        if isinstance(given, list):
            return "[" + ",".join(map(value, given)) + "]"
        if isinstance(given, dict):
            return "{" + ",".join(f"{key}:{value(each)}" for key, each in given.items()) + "}"
        return to_json(given)

    return lambda name, arguments: f"call:{name}{value(arguments)}"


def python(calls):
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    return f"[{', '.join(written)}]"


def listed(calls, name="name", arguments="arguments", **more):
    return to_json([{**more, name: each, arguments: given} for each, given in calls])


def deepseek(bar, head, tail, space=""):
    def render(calls):
        begin, end = f"<{bar}tool▁call▁begin{bar}>{space}", f"{space}<{bar}tool▁call▁end{bar}>{space}"
        written = "".join(f"{begin}{head(name, bar)}{to_json(given)}{tail}{end}" for name, given in calls)
        return f"<{bar}tool▁calls▁begin{bar}>{space}{written}<{bar}tool▁calls▁end{bar}>"

    return render


def kimi(calls):
    written = [
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{to_json(given)}<|tool_call_end|>"
        for n, (name, given) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def harmony(calls):
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{to_json(given)}<|call|>"
        for name, given in calls
    )


def harmony_head(calls):
    """As the chat template writes calls behind `<|start|>assistant`, with which its generation prompt ends."""
    return "<|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{to_json(given)}<|call|>" for name, given in calls
    )


HERMES = each(lambda name, given: f"<tool_call>\n{to_json({'name': name, 'arguments': given})}\n</tool_call>")
CODER = element(
    lambda n: f"<tool_call>\n<function={n}>\n", lambda k, v: f"<parameter={k}>\n{v}\n</parameter>\n", "</function>\n"
)
SEED = element(
    lambda n: f"<seed:tool_call>\n<function={n}>\n", lambda k, v: f"<parameter={k}>{v}</parameter>\n", "</function>\n"
)
GLM = element(
    lambda n: f"<tool_call>{n}", lambda k, v: f"\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>", "\n</tool_call>"
)
GLM47 = element(
    lambda n: f"<tool_call>{n}", lambda k, v: f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>", "</tool_call>"
)
INVOKE = element(
    lambda n: f'<invoke name="{n}">\n', lambda k, v: f'<parameter name="{k}">{v}</parameter>\n', "</invoke>\n"
)
CODER_TAGS = ("<parameter=", "</parameter>")
CODER_ENDS = ("</function>", "</tool_call>", "</seed:tool_call>")
MINIMAX_TAGS = ("<parameter name=", "</parameter>")
MINIMAX_ENDS = ("</invoke>", "</minimax:tool_call>")
GLM_TAGS = ("</arg_key>", "</arg_value>")
GLM_ENDS = ("</tool_call>",)


def minimax(calls):
    return f"<minimax:tool_call>\n{''.join(INVOKE(*call) for call in calls)}</minimax:tool_call>"


DSML_TAGS = ("<｜DSML｜parameter", "</｜DSML｜parameter>")
DSML_ENDS = ("</｜DSML｜invoke>", "</｜DSML｜function_calls>")
K3_TAGS = ("<|open|>argument", "<|close|>argument<|sep|>")
K3_ENDS = ("<|close|>call<|sep|>", "<|close|>tools<|sep|>", "<|close|>think<|sep|>")


def dsml(block):
    def value(key, given):
        text = "true" if isinstance(given, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{text}">{as_text(given)}</｜DSML｜parameter>\n'

    def render(calls):
        invoked = "".join(
            f'<｜DSML｜invoke name="{name}">\n{"".join(value(*each) for each in given.items())}</｜DSML｜invoke>\n'
            for name, given in calls
        )
        return f"<｜DSML｜{block}>\n{invoked}</｜DSML｜{block}>"

    return render


def kimi3(calls):
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}

    def value(key, given):
        kind = kinds.get(type(given), "null")
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{as_text(given)}<|close|>argument<|sep|>'

    written = "".join(
        f'<|open|>call tool="{name}" index="{n}"<|sep|>{"".join(value(*each) for each in given.items())}<|close|>call<|sep|>'
        for n, (name, given) in enumerate(calls)
    )
    return f"<|open|>tools<|sep|>{written}<|close|>tools<|sep|>"


def lines(calls):
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    return "<function_calls>\n" + "\n".join(written) + "\n</function_calls>"


NEW_MARKS = gemma('<|"|>')
V3 = deepseek("｜", lambda name, bar: f"function<{bar}tool▁sep{bar}>{name}\n```json\n", "\n```")
V31 = deepseek("｜", lambda name, bar: f"{name}<{bar}tool▁sep{bar}>", "")
V31_PLAIN = deepseek("|", lambda name, bar: f"{name}<{bar}tool▁sep{bar}>", "", "\n")
LLAMA = lambda calls: "; ".join(to_json({"name": n, "parameters": g}) for n, g in calls)  # noqa: E731

FORMATS = {
    "hermes": Format("hermes", HERMES, "<tool_call>"),
    "rl_factory": Format("rl_factory", HERMES, "<tool_call>", ("<answer>",)),
    "qwen3_coder": Format(
        "qwen3_coder",
        each(lambda n, g: CODER(n, g) + "</tool_call>"),
        "<tool_call>",
        CODER_TAGS,
        lenient=True,
        uncuttable=CODER_ENDS,
    ),
    "seed_oss": Format(
        "seed_oss",
        each(lambda n, g: SEED(n, g) + "</seed:tool_call>"),
        "<seed:tool_call>",
        CODER_TAGS,
        lenient=True,
        uncuttable=CODER_ENDS,
        trims=True,
    ),
    "qwen3_coder alone": Format(
        "qwen3_coder",
        each(lambda n, g: CODER(n, g).removeprefix("<tool_call>\n")),
        "<function=",
        CODER_TAGS,
        lenient=True,
        uncuttable=CODER_ENDS,
    ),
    "minimax_m2": Format(
        "minimax_m2", minimax, "<minimax:tool_call>", MINIMAX_TAGS, uncuttable=MINIMAX_ENDS, trims=True
    ),
    "minimax_m2 alone": Format(
        "minimax_m2", each(INVOKE), "<invoke name=", MINIMAX_TAGS, uncuttable=MINIMAX_ENDS, trims=True
    ),
    "glm4_moe": Format("glm4_moe", each(GLM), "<tool_call>", GLM_TAGS, uncuttable=GLM_ENDS),
    "glm47": Format("glm47", each(GLM47), "<tool_call>", GLM_TAGS, uncuttable=GLM_ENDS),
    "deepseek_v32": Format(
        "deepseek_v32", dsml("function_calls"), "<｜DSML｜function_calls>", DSML_TAGS, uncuttable=DSML_ENDS
    ),
    "deepseek_v4": Format("deepseek_v4", dsml("tool_calls"), "<｜DSML｜tool_calls>", DSML_TAGS, uncuttable=DSML_ENDS),
    "kimi_k3": Format("kimi_k3", kimi3, "<|open|>tools<|sep|>", K3_TAGS, uncuttable=K3_ENDS),
    "lfm2": Format("lfm2", lambda calls: f"<|tool_call_start|>{python(calls)}<|tool_call_end|>", "<|tool_call_start|>"),
    "olmo3": Format("olmo3", lines, "<function_calls>"),
    "gigachat3": Format(
        "gigachat3",
        each(lambda n, g: f"function call<|role_sep|>\n{to_json({'name': n, 'arguments': g})}<|message_sep|>\n\n"),
        "function call<|role_sep|>",
    ),
    "llama3_json": Format("llama3_json", LLAMA, "{", around=False),
    "llama3_json tag": Format("llama3_json", lambda calls: f"<|python_tag|>{LLAMA(calls)}", "<|python_tag|>"),
    "pythonic": Format("pythonic", python, "[", around=False),
    "llama4": Format(
        "llama4_pythonic", lambda calls: f"<|python_start|>{python(calls)}<|python_end|>", "<|python_start|>"
    ),
    "mistral v3": Format("mistral", lambda calls: f"[TOOL_CALLS]{listed(calls)}", "[TOOL_CALLS]"),
    "mistral v11": Format("mistral", each(lambda n, g: f"[TOOL_CALLS]{n}{to_json(g)}"), "[TOOL_CALLS]"),
    "mistral v13": Format(
        "mistral", each(lambda n, g: f"[TOOL_CALLS]{n}[CALL_ID]a1b2c3d4e[ARGS]{to_json(g)}"), "[TOOL_CALLS]"
    ),
    "mistral row": Format(
        "mistral", lambda calls: f"[TOOL_CALLS]{', '.join(n + to_json(g) for n, g in calls)}", "[TOOL_CALLS]"
    ),
    "deepseek_v3": Format("deepseek_v3", V3, "<｜tool▁call▁begin｜>"),
    "deepseek_v31": Format("deepseek_v31", V31, "<｜tool▁call▁begin｜>"),
    "deepseek_v31 plain": Format("deepseek_v31", V31_PLAIN, "<|tool▁call▁begin|>"),
    "kimi_k2": Format("kimi_k2", kimi, "<|tool_call_begin|>"),
    "gpt_oss": Format("gpt_oss", harmony, "to=functions."),
    "gpt_oss head": Format("gpt_oss", harmony_head, "to=functions.", around=False),
    "phi4": Format("phi4", lambda calls: f"functools{listed(calls)}", "functools["),
    "phi4 tag": Format("phi4", lambda calls: f"<|tool_call|>{listed(calls)}<|/tool_call|>", "<|tool_call|>"),
    "granite": Format("granite", lambda calls: f"<|tool_call|>{listed(calls)}", "<|tool_call|>"),
    "granite bare": Format("granite", listed, "[{", around=False),
    "granite 3.1": Format("granite", lambda calls: f"<tool_call>{listed(calls)}", "<tool_call>"),
    "granite 4": Format("granite", HERMES, "<tool_call>"),
    "granite 20b": Format(
        "granite", each(lambda n, g: f"<function_call> {to_json({'name': n, 'arguments': g})}"), "<function_call>"
    ),
    "internlm2": Format(
        "internlm2",
        each(lambda n, g: f"<|action_start|><|plugin|>\n{to_json({'name': n, 'parameters': g})}<|action_end|>"),
        "<|action_start|><|plugin|>",
    ),
    "xlam": Format("xlam", listed, "[{", around=False),
    "xlam fence": Format("xlam", lambda calls: f"```json\n{listed(calls)}\n```", '```json\n[{"name":'),
    "cohere": Format(
        "cohere",
        lambda calls: f"<|START_ACTION|>{listed(calls, 'tool_name', 'parameters', tool_call_id='0')}<|END_ACTION|>",
        "<|START_ACTION|>",
    ),
    "gemma4": Format(
        "gemma", each(lambda n, g: f"<|tool_call>{NEW_MARKS(n, g)}<tool_call|>"), "<|tool_call>", ('<|"|>',)
    ),
    "functiongemma": Format(
        "functiongemma",
        each(lambda n, g: f"<start_function_call>{gemma('<escape>')(n, g)}<end_function_call>"),
        "<start_function_call>",
        ("<escape>",),
    ),
}


def parse(name, text, tools=None):
    return ToolParser.get_tool_parser(name).parse(text, tools)


def calls_of(parsed):
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


def schemas(calls):
    """Tool schemas whose arguments have the types of the given values."""
    kinds = {
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "number",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kinds[type(value)]} for key, value in arguments.items()},
                },
            },
        }
        for name, arguments in calls
    ]
