"""JSON of any kind is read by one strict reader, whose errors name the document, the place and the fix."""

from __future__ import annotations

from typing import Any

import pytest

import commfuse_fx as cf
from commfuse_fx.support.strict_json import JsonRules, parse_json, parse_object

PLAIN = JsonRules("write it again")
EXACT = JsonRules("correct it", cf.ConfigTypeError, cf.ConfigKeyError, constants=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'a': 1}", "FILE, line 1, column 2: not JSON (Expecting property name"),
        ("[1,\n 2 3]", "FILE, line 2, column 4: not JSON"),
        ('{"a": [{"b": 1, "b": 2}]}', "FILE: the key 'b' stands twice in one object"),
        ("[-Infinity]", "FILE: this JSON cannot be read (-Infinity is no number of JSON)"),
        ("9" * 5000, "FILE: this JSON cannot be read"),
        ("[" * 100_000, "FILE is nested too deeply"),
        ('{"a": [0, {"b": "\\ud800"}]}', "FILE: a[1].b is '\\ud800', which has half of a surrogate pair"),
        ('{"a": {"\\udfff": 1}}', "FILE: a key of a is '\\udfff', which has half"),
        ('"\ud800"', "FILE: the text is '\\ud800', which has half"),
    ],
)
def test_what_is_no_strict_json(text: str, message: str) -> None:
    with pytest.raises(cf.ConfigValueError) as raised:
        parse_json(text, "FILE", PLAIN)
    assert str(raised.value).startswith(message) and str(raised.value).endswith("; write it again")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("3", cf.ConfigTypeError, "FILE is 3; give a JSON object"),
        ("{}", cf.ConfigKeyError, 'FILE: key "schema" is missing; give "schema": 2'),
        ('{"a": 1, "a": 1}', cf.ConfigKeyError, "FILE: the key 'a' stands twice"),
        ('{"schema": true}', cf.ConfigTypeError, "FILE: schema is True; give 2"),
        ('{"schema": NaN}', cf.ConfigTypeError, "FILE: schema is nan; give 2"),
        ('{"schema": 0}', cf.ConfigValueError, "FILE: schema is 0, not a version number; give 2"),
        (
            '{"schema": 3}',
            cf.ConfigValueError,
            "FILE: schema is 3, and this version of commfuse-fx reads",
        ),
    ],
)
def test_the_class_of_an_error_is_that_of_the_rules(text: str, kind: type[Exception], message: str) -> None:
    for rules, raises in ((EXACT, kind), (PLAIN, cf.ConfigValueError)):
        if rules is PLAIN and "NaN" in text:
            continue
        with pytest.raises(raises) as raised:
            parse_object(text, "FILE", 2, rules)
        assert type(raised.value) is raises and str(raised.value).startswith(message)


def test_what_is_read() -> None:
    given: Any = parse_object('{"schema": 1, "a": ["\\ud83d\\ude00", null, 1e2]}', "FILE", 2, PLAIN)
    assert given == {"schema": 1, "a": ["\U0001f600", None, 100.0]}
    assert str(parse_json("[NaN, -Infinity]", "FILE", EXACT)) == "[nan, -inf]"
