"""Chat templates: what honest ones print, compared with transformers, and what hostile ones cannot do."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from chairlift.errors import ModelError, ParameterError
from chairlift.models import chat
from chairlift.models.chat import MAX_PROMPT, ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION = [
    {"role": "system", "content": "Be brief.  "},
    {"role": "user", "content": "Hi, <you> & 'me' \u00e9 \U0001f389"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye\n"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": [1, 2.5, None, True], "a": "\u00fc<>"}}}]

TEMPLATES = {
    "chatml": """{% for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama3": """{% set loop_messages = messages %}{% for message in loop_messages %}
    {% set head = '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\n\n' %}
    {% set content = head ~ message['content'] | trim ~ '<|eot_id|>' %}
    {% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
    {{- content }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = '' -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}""",
    "tools": """{%- if tools %}{{ '# Tools\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}
{%- endfor %}{{ tools | tojson(indent=2) }}{% endif %}
{%- set ns = namespace(last=-1, text='') %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'system' %}{% continue %}{% endif %}
{%- if loop.index0 > ns.last %}{% break %}{% endif %}
{%- generation %}{{ message.role | capitalize }}: {{ message.content.strip().replace('i', 'I') }}
{%- endgeneration %}|{% endfor %}{{ ns.last }}""",
    "macros": """{% macro say(role, text) %}[{{ role | upper }}]{{ text | indent(2) }}{% endmacro %}
{% for m in messages if m.role != 'system' %}{{ say(m.role, m.content) }}{% if not loop.last %}, {% endif %}{% endfor %}
{{ messages | map(attribute='role') | join('/') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ messages[1].content.split(',')[0] }}{{ ', '.join(['x', 'y']) }} {{ 7 // 2 }} {{ 2 * 3 }}
{{ 'ab' * 2 }} {{ [1] + [2] }}
{{ {'a': 1}.items() | list }} {{ undefined_name }} {{ tools is defined and tools is not none }}
{{ range(3) | list }}""",
}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str, generation: bool, tools: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = TEMPLATES[name]
    (expected,), _ = render_jinja_template(
        [CONVERSATION], tools=tools, chat_template=source, add_generation_prompt=generation, **SPECIAL
    )
    template = ChatTemplate(source, "model", SPECIAL)
    assert template.render(CONVERSATION, generation, tools=tools) == expected
    assert len(expected) > 40


def test_the_date_is_todays() -> None:
    import datetime

    text = ChatTemplate("{{ strftime_now('%Y') }}", "model", {}).render([])
    assert text == str(datetime.datetime.now().year)


def test_a_template_may_refuse_messages() -> None:
    template = ChatTemplate(TEMPLATES["gemma"], "model", SPECIAL)
    with pytest.raises(ParameterError, match="refuses these messages: roles must alternate") as caught:
        template.render([{"role": "assistant", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "u", "content": None}, {"role": "u", "content": 1}])
def test_messages_a_template_fails_on_are_the_clients_fault(message: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="the chat template fails on these messages") as caught:
        ChatTemplate(TEMPLATES["chatml"], "model", SPECIAL).render([message])
    assert caught.value.param == "messages"


def test_a_broken_template_is_reported_when_it_is_used() -> None:
    template = ChatTemplate("{% for %}", "model.gguf", {})
    with pytest.raises(ModelError, match=r"model\.gguf: its chat template is broken"):
        template.render([])
    with pytest.raises(ModelError, match="characters long"):
        ChatTemplate("x" * 2**21, "model", {}).render([])


def test_nothing_stays_from_one_rendering_to_the_next() -> None:
    template = ChatTemplate("{% for m in messages %}{% for i in range(90000) %}{% endfor %}{% endfor %}ok", "model", {})
    for _ in range(3):
        assert template.render([{}] * 2) == "ok"


LOOP = "{% for i in range(60) %}"
HOSTILE = {
    "endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless loop, name taken": (
        "{% set tick = 1 %}{% for a in range(999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "recursion in depth": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursion in breadth": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "long output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "long captured output": "{% set s %}{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}{% endset %}",
    "doubling by capture": "{% set s = 'xxxxxxxx' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60 + "{{ s }}",
    "doubling by ~": "{% set n = namespace(s='xxxx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling by +": "{% set n = namespace(s='xxxx') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling a list": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "nested lists": "{% set n = namespace(s=[1]) %}" + LOOP + "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "nested lists as JSON": (
        "{% set n = namespace(s=[1]) %}" + LOOP + "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}"
    ),
    "long string": "{{ 'x' * 10000000000 }}",
    "long string, turned": "{{ 10000000000 * 'x' }}",
    "long list": "{{ [1] * 10000000000 }}",
    "long number": "{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "format method": "{{ '{:10000000000}'.format(1) }}",
    "center": "{{ 'x' | center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "replace": "{% set s = 'x' * 1000000 %}{{ s | replace('x', s) }}",
    "replace method": "{% set s = 'x' * 1000000 %}{{ s.replace('x', s) }}",
    "join": "{% set s = 'x' * 1000000 %}{{ range(99999) | join(s) }}",
    "join method": "{% set s = 'x' * 1000000 %}{{ s.join(['a'] * 99999) }}",
    "range": "{{ range(10000000000) | list }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attribute by filter": "{{ '' | attr('__class__') }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "namespace internals": "{{ namespace.__init__.__globals__ }}",
    "format string attack": "{{ '{0.__class__}'.format(messages) }}",
    "changes messages": "{{ messages.append(1) }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_templates_end_soon_and_small(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, or at least nothing of what was wanted: no internals in the text, no memory beyond the limits."""
    monkeypatch.setattr(chat, "MAX_SECONDS", 2.0)
    tracemalloc.start()
    try:
        text = ChatTemplate(HOSTILE[case], "model", {}).render([{"role": "user", "content": "x"}])
    except (ModelError, ParameterError) as error:
        assert "\n" not in str(error)
    else:
        assert case in ("class", "attribute by filter", "globals", "namespace internals"), text[:100]
        assert text.strip() == "" and "passwd" not in text
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * MAX_PROMPT


def test_long_conversations_are_not_hostile() -> None:
    messages = [{"role": "user", "content": "word " * 2000}] * 300
    assert len(ChatTemplate(TEMPLATES["chatml"], "model", SPECIAL).render(messages)) > 3_000_000
