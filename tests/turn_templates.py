"""Chat templates whose turns end in unlike ways: replicas of two families, and a generator of many more."""

from dataclasses import dataclass

from hypothesis import strategies as st

# As gpt-oss writes: heads with channels, one call a turn, `<|return|>` behind the last turn alone, the caller's name in
# the answers, and no tool's answer without a call before it.
HARMONY = """{{- '<|start|>system<|message|>You are a model.<|end|>' }}
{%- set first = namespace(skip=0) %}
{%- set instructions = '' %}
{%- if messages[0].role in ['system', 'developer'] %}
    {%- set instructions = messages[0].content %}
    {%- set first.skip = 1 %}
{%- endif %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' + instructions }}
    {%- if tools %}
        {{- '\\n# Tools\\n\\nnamespace functions {' }}
        {%- for tool in tools %}{{- '\\ntype ' + tool.function.name + ' = (_: any) => any;' }}{%- endfor %}
        {{- '\\n}' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in messages[first.skip:] %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.content %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}
        {{- '<|call|>' }}
        {%- set called.name = call.name %}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- set called.name = none %}
    {%- elif message.role == 'tool' %}
        {%- if called.name is none %}{{- raise_exception('a tool message without a call before it') }}{%- endif %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson }}
        {{- '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

# As GLM-4.5 writes: no turn is closed, the next message's token follows; answers of tools share one head; the reasoning of
# turns before the last question is left out.
ROLES = """[gMASK]<sop>
{%- if tools %}{{- '<|system|>\\n# Tools\\n' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{%- endif %}
{%- set asked = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- set words = m.content or '' %}
        {%- if '</think>' in words %}
            {%- set thought = words.split('</think>')[0].split('<think>')[-1].strip() %}
            {%- set words = words.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|assistant|>\\n<think>' + (thought if loop.index0 > asked.last else '') + '</think>' }}
        {%- if words.strip() %}{{- '\\n' + words.strip() }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- value if value is string else value | tojson }}
                {{- '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + m.role + '|>\\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('\\n<think></think>' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif %}"""
ROLES_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

GENERATE = "{%- if add_generation_prompt %}{{- HEAD }}{%- endif %}"


def chain(*branches, head, before=""):
    """A template of messages, each written by the first branch whose condition it meets, and a generation prompt."""
    written = "".join(
        f"{{%- {'el' if n else ''}if {when} %}}{{{{- {what} }}}}" for n, (when, what) in enumerate(branches)
    )
    return f"{before}{{%- for m in messages %}}{written}{{%- endif %}}{{%- endfor %}}" + GENERATE.replace("HEAD", head)


ROLE = "m.role == '{}'".format
FAMILIES = {
    "Kimi K2": (
        chain(
            (
                "m.role == 'assistant' and m.tool_calls",
                "'<|im_assistant|>assistant<|im_middle|>' + (m.content or '') + '<|tool_calls_section_begin|>'"
                " + '<|tool_call_begin|>' + m.tool_calls[0].id + '<|tool_call_argument_begin|>'"
                " + (m.tool_calls[0].function.arguments | tojson) + '<|tool_call_end|><|tool_calls_section_end|><|im_end|>'",
            ),
            (ROLE("assistant"), "'<|im_assistant|>assistant<|im_middle|>' + m.content + '<|im_end|>'"),
            (
                ROLE("tool"),
                "'<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content + '<|im_end|>'",
            ),
            ("true", "'<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>'"),
            head="'<|im_assistant|>assistant<|im_middle|>'",
        ),
        ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_call_begin|>"),
        "<|im_end|>",
    ),
    "DeepSeek V3.1": (
        "{%- set ns = namespace(asked=false) %}{{- '<｜begin▁of▁sentence｜>' }}"
        "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.asked = true %}{{- '<｜User｜>' + m.content }}"
        "{%- elif m.role == 'assistant' %}{{- '<｜Assistant｜></think>' if ns.asked else '' }}{%- set ns.asked = false %}"
        "{%- if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}"
        "{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}"
        "{%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
        "{%- else %}{{- m.content + '<｜end▁of▁sentence｜>' }}{%- endif %}"
        "{%- elif m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt and ns.asked %}{{- '<｜Assistant｜></think>' }}{%- endif %}",
        (
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁output▁begin｜>",
        ),
        "<｜end▁of▁sentence｜>",
    ),
    "Mistral": (
        chain(
            (ROLE("user"), "'[INST]' + m.content + '[/INST]'"),
            (
                "m.tool_calls",
                "'[TOOL_CALLS][{' + m.tool_calls[0].function.name + (m.tool_calls[0].function.arguments | tojson)"
                " + m.tool_calls[0].id + '}]</s>'",
            ),
            (ROLE("assistant"), "m.content + '</s>'"),
            (
                "m.role == 'tool' and m.tool_call_id | length == 9",
                "'[TOOL_RESULTS]{\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]'",
            ),
            ("true", "raise_exception('a tool message must name a call')"),
            head="''",
            before="{{- '<s>' }}",
        ),
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>",
    ),
    "Granite": (
        chain(
            (ROLE("tool"), "'<|start_of_role|>tool_response<|end_of_role|>' + m.content + '<|end_of_text|>\\n'"),
            ("true", "'<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n'"),
            head="'<|start_of_role|>assistant<|end_of_role|>'",
        ),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        "<|end_of_text|>",
    ),
    "Phi-4-mini": (
        chain(("true", "'<|' + m.role + '|>' + m.content + '<|end|>'"), head="'<|assistant|>'")
        + "{%- if not add_generation_prompt %}{{- '<|endoftext|>' }}{%- endif %}",
        ("<|user|>", "<|assistant|>", "<|tool|>", "<|system|>", "<|end|>"),
        "<|endoftext|>",
    ),
    "MiniMax M2": (
        chain(
            (ROLE("assistant"), "']~b]ai\\n' + m.content + '[e~[\\n'"),
            (
                ROLE("tool"),
                "(']~b]tool' if messages[loop.index0 - 1].role != 'tool' else '') + '\\n<response>' + m.content"
                " + '</response>' + ('[e~[\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '')",
            ),
            ("true", "']~b]' + m.role + '\\n' + m.content + '[e~[\\n'"),
            head="']~b]ai\\n<think>\\n'",
        ),
        ("]~b]", "[e~["),
        "[e~[",
    ),
    "Seed-OSS": (
        chain(("true", "'<seed:bos>' + m.role + '\\n' + m.content + '<seed:eos>'"), head="'<seed:bos>assistant\\n'"),
        ("<seed:bos>", "<seed:eos>"),
        "<seed:eos>",
    ),
    "Gemma 3": (
        chain(
            (
                "(m.role == 'user') != (loop.index0 % 2 == 0)",
                "raise_exception('Conversation roles must alternate user/assistant/user/assistant')",
            ),
            (
                "true",
                "'<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (m.content | trim)"
                " + '<end_of_turn>\\n'",
            ),
            head="'<start_of_turn>model\\n'",
            before="{{- '<bos>' }}",
        ),
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "gpt-oss": (HARMONY, HARMONY_TOKENS, "<|return|>"),
    "GLM 4.5": (ROLES, ROLES_TOKENS, "<|endoftext|>"),
}
"""(template, special tokens, eos), in the manner of these models' own."""

OPENINGS = {
    "token a role": "<|{}|>",
    "one token": "<|im_start|>{}\n",
    "two tokens": "<|head|>{}<|/head|>",
    "words": "{}: ",
}
ENDS = ("its own", "none", "another when last", "only when last")
SHAPE_TOKENS = (
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|im_start|>",
    "<|head|>",
    "<|/head|>",
    "<|end|>",
    "<|last|>",
    "<|call|>",
)


@dataclass(frozen=True)
class Shape:
    """A template: how messages begin, how the assistant's end, whether others are closed, what stands behind an end.

    `calls`: not written, or written and closed as answers are, or by a token of their own. `strict`: a tool's message must
    answer a call. `group`: consecutive messages of tools share one head.
    """

    opening: str
    end: str
    closed: bool
    behind: str
    trim: bool
    group: bool
    calls: str
    strict: bool

    @property
    def template(self) -> str:
        """The template's source."""
        last = "loop.last and not add_generation_prompt"
        end = {
            "its own": f"'<|im_end|>{self.behind}'",
            "none": "''",
            "another when last": f"('<|last|>' if {last} else '<|end|>{self.behind}')",
            "only when last": f"('<|last|>' if {last} else '')",
        }[self.end]
        close = f"'<|end|>{self.behind}'" if self.closed else "''"
        call_end = f"'<|call|>{self.behind}'" if self.calls == "own end" else end
        head = {role: repr(OPENINGS[self.opening].format(role)) for role in ("assistant", "tool")}
        other = " + m.role + ".join(map(repr, OPENINGS[self.opening].split("{}")))
        body = "(m.content or '')" + (" | trim" if self.trim else "")
        raising = "{{- raise_exception('it answers no call') }}"
        strict = f"{{%- if ns.open == 0 %}}{raising}{{%- endif %}}{{%- set ns.open = ns.open - 1 %}}"
        calls = """{%- for c in m.tool_calls %}
                {{- '[' + c.function.name + (c.function.arguments | tojson) + ']' }}
            {%- endfor %}
            {%- set ns.open = m.tool_calls | length %}"""
        called = (
            "" if self.calls == "unwritten" else f"{{%- if m.tool_calls %}}{calls}{{{{- {call_end} }}}}{{%- else %}}"
        )
        tool = f"{{{{- {head['tool']} + body + {close} }}}}"
        if self.group:
            first = "loop.first or messages[loop.index0 - 1].role != 'tool'"
            tool = f"""{{%- if {first} %}}{{{{- {head["tool"]} }}}}{{%- endif %}}
            {{{{- '<' + body + '>' }}}}
            {{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}}{{{{- {close} }}}}{{%- endif %}}"""
        return f"""{{%- set ns = namespace(open=0) %}}
{{%- for m in messages %}}
    {{%- set body = {body} %}}
    {{%- if m.role == 'assistant' %}}
        {{%- set ns.open = 0 %}}{{{{- {head["assistant"]} + body }}}}
        {called}{{{{- {end} }}}}{"{%- endif %}" if called else ""}
    {{%- elif m.role == 'tool' %}}{strict if self.strict else ""}{tool}
    {{%- else %}}{{{{- {other} + body + {close} }}}}{{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- {head["assistant"]} }}}}{{%- endif %}}"""


def _sensible(shape: Shape) -> bool:
    if shape.strict and shape.calls == "unwritten":
        return False
    if (
        shape.calls == "own end" and shape.end == "none"
    ):  # whether such turns are closed decides what ends a turn that calls
        return False
    return shape.end in ("its own", "another when last") or shape.opening != "words"  # something must end a turn


SHAPES = st.builds(
    Shape,
    opening=st.sampled_from(list(OPENINGS)),
    end=st.sampled_from(ENDS),
    closed=st.booleans(),
    behind=st.sampled_from(["", "\\n"]),
    trim=st.booleans(),
    group=st.booleans(),
    calls=st.sampled_from(["unwritten", "as answers", "own end"]),
    strict=st.booleans(),
).filter(_sensible)
