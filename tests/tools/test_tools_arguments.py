"""Arguments: decoded in one way only, checked against the whole schema, repaired where a string holds the JSON."""

import json
import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from session_stage import Scripted, call, in_virtual_time, outcome_of, session

from etude.errors import ConfigError
from etude.tools.arguments import MAX_DEPTH, ArgumentChecker, ArgumentError, decode_arguments

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "home": {"$ref": "#/$defs/place"},
        "work": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "size": {"type": "number"},
        "likes": {"type": "boolean"},
        "code": {"type": "string", "pattern": "^[a-z]+$"},
        "colour": {"enum": ["red", "green", 3]},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}
CHECKER = ArgumentChecker(PERSON, "person")


def checked(arguments):
    return CHECKER.check(decode_arguments(json.dumps(arguments)))


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        ({"name": "Ann"}, {"name": "Ann"}),
        ({"name": "Ann", "age": "7"}, {"name": "Ann", "age": 7}),
        ({"name": "Ann", "size": "7.5", "likes": "true"}, {"name": "Ann", "size": 7.5, "likes": True}),
        ({"name": "Ann", "home": '{"x": 1}'}, {"name": "Ann", "home": {"x": 1}}),
        ({"name": "Ann", "home": '{"x": "1"}'}, {"name": "Ann", "home": {"x": 1}}),
        ({"name": "Ann", "work": '{"x": 1}'}, {"name": "Ann", "work": {"x": 1}}),
        ({"name": "Ann", "work": "null"}, {"name": "Ann", "work": None}),
        ({"name": "Ann", "tags": '["a", "b"]'}, {"name": "Ann", "tags": ["a", "b"]}),
        ({"name": "Ann", "colour": "3"}, {"name": "Ann", "colour": 3}),
        ({"name": "12"}, {"name": "12"}),  # a string where a string is wanted stays one
        ({"name": "Ann", "tags": ["1", "true"]}, {"name": "Ann", "tags": ["1", "true"]}),
    ],
)
def test_strings_that_hold_json_are_accepted_where_something_else_is_wanted(given, understood):
    assert checked(given) == understood


def test_the_whole_object_may_be_a_string():
    assert decode_arguments(json.dumps(json.dumps({"name": "Ann"}))) == {"name": "Ann"}
    with pytest.raises(ArgumentError, match="must be a JSON object"):
        decode_arguments(json.dumps(json.dumps(json.dumps({}))))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "'name' is a required property"),
        ({"name": 5}, "'name': 5 is not of type 'string'"),
        ({"name": "A"}, "'name': 'A' is too short"),
        ({"name": "Ann", "age": "old"}, "'age': 'old' is not of type 'integer'"),
        ({"name": "Ann", "age": "1.5"}, "'age': 1.5 is not of type 'integer'"),
        ({"name": "Ann", "age": -1}, "'age': -1 is less than the minimum of 0"),
        ({"name": "Ann", "home": {"x": "here"}}, "'home.x': 'here' is not of type 'integer'"),
        ({"name": "Ann", "tags": ["a", 2]}, r"'tags\[1\]': 2 is not of type 'string'"),
        ({"name": "Ann", "tags": ["a", "a"]}, r"'tags': \['a', 'a'\] has non-unique elements"),
        ({"name": "Ann", "hobby": 1}, r"'hobby' was unexpected"),
        ({"name": "Ann", "code": "A1"}, "'code': 'A1' does not match"),
        ({"name": "Ann", "colour": "blue"}, r"'colour': 'blue' is not one of \['red', 'green', 3\]"),
    ],
)
def test_a_violation_is_one_line_that_names_the_field(given, told):
    with pytest.raises(ArgumentError, match=told) as caught:
        checked(given)
    assert "\n" not in str(caught.value)
    assert caught.value.word == "invalid_arguments"


def test_a_huge_value_does_not_drown_the_sentence():
    with pytest.raises(ArgumentError, match="… is not of type 'integer'") as caught:
        checked({"name": "Ann", "age": "x" * 100_000})
    assert len(str(caught.value)) < 300
    with pytest.raises(ArgumentError) as caught:
        checked({"name": "Ann", "k" * 100_000: 1})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("{'a': 1}", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('"text"', "not valid JSON"),
        ('{"a": NaN}', "NaN is not allowed"),
        ('{"a": [-Infinity]}', "-Infinity is not allowed"),
        ('{"a": 1e999}', "1e999 is out of range"),
        ('{"a": ' + "1" * 5000 + "}", "not valid JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
        ('{"b": {"a": 1, "a": 1}}', "the key 'a' is given twice"),
        ('{"a": "\\ud83d"}', "which is no character"),
        ('{"\\udc00": 1}', "which is no character"),
        ('{"a": "\udcff"}', "which is no character"),  # a byte that was no UTF-8, as Python smuggles it
        ('{"a": ' + "[" * 101 + "]" * 101 + "}", "deeper than 100 levels"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 50_000, "nested too deeply"),
    ],
)
def test_what_is_not_one_json_object(text, told):
    with pytest.raises(ArgumentError, match=told) as caught:
        decode_arguments(text)
    assert caught.value.word == "malformed"
    assert len(str(caught.value)) < 400


def test_a_pair_of_surrogates_is_one_character():
    assert decode_arguments('{"a": "\\ud83d\\ude42"}') == {"a": "🙂"}


def test_depth_is_counted_in_levels_not_brackets():
    wide = {"a": [[] for _ in range(10 * MAX_DEPTH)]}
    assert decode_arguments(json.dumps(wide)) == wide
    deep: object = 1
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert decode_arguments(json.dumps({"a": deep})) == {"a": deep}
    with pytest.raises(ArgumentError, match="deeper"):
        decode_arguments(json.dumps({"a": [deep]}))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), values, max_size=4))
def test_what_json_says_is_what_is_understood(arguments):
    text = json.dumps(arguments)
    assert decode_arguments(text) == json.loads(text) == arguments


@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_any_text_is_an_object_or_one_line(text):
    try:
        assert isinstance(decode_arguments(text), dict)
    except ArgumentError as error:
        told = str(error)
    else:
        return
    assert "\n" not in told


TYPES = ["string", "integer", "number", "boolean", "object", "array", "null"]
names = st.text(string.ascii_lowercase, min_size=1, max_size=2)
plain_schemas = st.fixed_dictionaries(
    {
        "type": st.just("object"),
        "properties": st.dictionaries(names, st.sampled_from(TYPES).map(lambda kind: {"type": kind}), max_size=4),
        "required": st.lists(names, max_size=2, unique=True),
        "additionalProperties": st.booleans(),
    }
)


@settings(max_examples=300)
@given(schema=plain_schemas, arguments=st.dictionaries(names, values, max_size=4))
def test_a_check_ends_in_valid_arguments_or_an_error(schema, arguments):
    valid = Draft202012Validator(schema)
    before = json.dumps(arguments)
    was_valid = valid.is_valid(arguments)
    try:
        after = ArgumentChecker(schema, "t").check(arguments)
    except ArgumentError:
        assert not was_valid
    else:
        assert valid.is_valid(after)
        assert not was_valid or json.dumps(after) == before


UNIQUE = ArgumentChecker(
    {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}, "t"
)


@given(st.lists(values, max_size=5))
def test_unique_items_means_what_json_schema_means(items):
    expected = Draft202012Validator({"uniqueItems": True}).is_valid(items)
    try:
        UNIQUE.check({"a": items})
    except ArgumentError:
        assert not expected
    else:
        assert expected


def test_hostile_arguments_cost_linear_time():  # or this test runs into its time limit
    many = [{"a": i} for i in range(20_000)]  # the library's own comparison of every pair takes minutes
    assert UNIQUE.check({"a": many}) == {"a": many}


def doubling(levels, leaf="string"):
    """A schema that refers twice to one that refers twice …: 2 to the power of `levels` comparisons."""
    defs = {f"s{n}": {"allOf": [{"$ref": f"#/$defs/s{n + 1}"}] * 2} for n in range(levels)}
    return {"$defs": {**defs, f"s{levels}": {"type": leaf}}}


EVIL = "^(a|aa)+$"
HOSTILE = [
    ({**doubling(40), "properties": {"a": {"$ref": "#/$defs/s0"}}}, {"a": "x"}),
    ({**doubling(40), "additionalProperties": {"$ref": "#/$defs/s0"}}, {"a": "x"}),
    (
        {"properties": {"a": {"type": "array", "items": {"anyOf": [{"pattern": EVIL}] * 300}}}},
        {"a": ["a" * 50 + "b"] * 99},
    ),
    ({"properties": {"a": {"pattern": EVIL}}}, {"a": "a" * 100 + "b"}),
    ({"properties": {"a": {"pattern": "^.*.*.*b$"}}}, {"a": "a" * 150_000}),
    ({"patternProperties": {EVIL: {"type": "integer"}}, "additionalProperties": False}, {"a" * 100 + "b": 1}),
    ({"patternProperties": {EVIL: {}}, "unevaluatedProperties": False, "required": ["c"]}, {"a" * 100 + "b": 1}),
    ({"propertyNames": {"pattern": EVIL}}, {"a" * 100 + "b": 1}),
]


@pytest.mark.parametrize(("parameters", "arguments"), HOSTILE)
def test_a_hostile_schema_costs_bounded_time(parameters, arguments):
    checker = ArgumentChecker({"type": "object", **parameters}, "t")
    started = time.thread_time()
    with pytest.raises(ArgumentError):
        checker.check(arguments)
    assert time.thread_time() - started < 10  # a second, and a search; without a limit: years


@pytest.mark.parametrize(
    "parameters",
    [{**doubling(40, "object"), "$ref": "#/$defs/s0"}, {"properties": {"a": {"pattern": "a{9999999999999}"}}}],
)
def test_a_hostile_schema_is_refused_when_it_is_loaded(parameters):
    with pytest.raises(ConfigError, match="tool 't'"):
        ArgumentChecker(parameters, "t")


PATTERNS = {"^n_": {"type": "integer"}, "^s": {"type": "string"}}


@given(
    st.dictionaries(
        st.sampled_from(["n_1", "s", "sn_", "other", "a"]), st.one_of(st.integers(), st.text()), max_size=4
    ),
    st.sampled_from([False, True, {"type": "string"}, None]),
)
def test_keywords_with_patterns_mean_what_json_schema_means(arguments, additional):
    schema = {"type": "object", "properties": {"a": {"pattern": "^[a-c]?$"}}, "patternProperties": PATTERNS}
    schema |= {} if additional is None else {"additionalProperties": additional}
    try:
        ArgumentChecker(schema, "t").check(dict(arguments))
        valid = True
    except ArgumentError:
        valid = False
    decoded = any(isinstance(value, str) and value.strip().lstrip("-").isdigit() for value in arguments.values())
    assert decoded or valid == Draft202012Validator(schema).is_valid(arguments)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"type": "object", "properties": {"a": {"type": "text"}}}, r"parameters.properties.a.type: 'text'"),
        ({"type": "object", "required": "a"}, "parameters.required"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/gone"}}}, "cannot be used"),
        ({"type": "object", "properties": {"a": {"$ref": "http://example.com/s.json"}}}, "cannot be used"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, "properties.a.pattern"),
        ({"$ref": "#"}, "refers to itself without end"),
    ],
)
def test_a_schema_that_cannot_be_used_is_a_configuration_error(parameters, told):
    with pytest.raises(ConfigError, match=f"tool 't'.*{told}"):
        ArgumentChecker(parameters, "t")


def test_a_recursive_schema_is_followed():
    tree = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "value": {"type": "integer"}},
        "required": ["value"],
    }
    checker = ArgumentChecker(tree, "t")
    assert checker.check({"value": 1, "next": '{"value": "2"}'}) == {"value": 1, "next": {"value": 2}}
    with pytest.raises(ArgumentError, match=r"'next.next': 'value' is a required property"):
        checker.check({"value": 1, "next": {"value": 2, "next": {}}})


# --- in the session ------------------------------------------------------------------------------------------------


def test_the_tool_is_neither_created_nor_called_and_the_model_is_told():
    tool = Scripted(parameters=PERSON)
    outcome = outcome_of(tool, '{"name": 5}')
    assert (outcome.error, outcome.reward, tool.log) == ("invalid_arguments", 0.0, [])
    assert outcome.response.text == "Error in the call of 't': 'name': 5 is not of type 'string'."


@in_virtual_time
async def test_one_bad_call_leaves_the_others_of_its_turn_alone():
    tool = Scripted(parameters=PERSON)
    async with session(tool) as opened:
        outcomes = await opened.execute([call(arguments=a) for a in ("{", '{"name": "Ann"}', "{}", "[]")], 0)
    assert [outcome.error for outcome in outcomes] == ["malformed", None, "invalid_arguments", "malformed"]
    assert tool.count("execute") == 1


def test_oversized_arguments_are_refused_unread():
    tool = Scripted(config={"max_arguments_chars": 20})
    outcome = outcome_of(tool, '{"a": "' + "x" * 10_000_000 + '"}')
    assert (outcome.error, tool.log) == ("malformed", [])
    assert outcome.response.text == "Error in the call of 't': the arguments are longer than 20 characters."
    assert outcome_of(tool, '{"a": "x"}').error is None
