"""Chat templates with the constructs of published ones: our text is that of transformers' renderer."""

from __future__ import annotations

import pytest

from torch_fdattn.models import ModelError
from torch_fdattn.models.chat_template import render

pytest.importorskip("jinja2", reason="needs the package jinja2")
theirs = pytest.importorskip(
    "transformers.utils.chat_template_utils", reason="transformers is the reference here"
)

SPECIAL = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<|endoftext|>",
}
USER = {"role": "user", "content": "  What's <b> & 2+2? é 日本\n"}
ANSWER = {"role": "assistant", "content": " It is 4. "}
THOUGHT = {"role": "assistant", "content": "<think>\nsum\n</think>\n\nIt is 4."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "id": "abcdefghi",
         "function": {"name": "add", "arguments": {"x": 2, "y": "<é>"}}}
    ],
}  # fmt: skip
SYSTEM = {"role": "system", "content": "Be brief."}
AGAIN = {"role": "user", "content": "And 3 + 3?"}
CONVERSATIONS = {
    "one turn": [USER],
    "with a system message": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, AGAIN],
    "without a system message": [USER, ANSWER, AGAIN],
    "a thought": [USER, THOUGHT, AGAIN],
    "a tool": [SYSTEM, USER, CALL, {"role": "tool", "content": '{"result": 4}'}, AGAIN],
    "two of one role": [USER, AGAIN],
    "an answer to go on with": [USER, ANSWER],
    "the system alone": [SYSTEM],
}

# Written for this test, each with the constructs that the model's published template is made of.
TEMPLATES = {
    "ChatML": """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "Llama-2": """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "Llama-3": """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}""",
    "Llama-3.1": """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|' + message['role'] + '|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n\\n' }}{%- endif %}""",
    "Qwen2.5": """{%- if tools %}
    {{- '<tools>' }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools>" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "Qwen3": """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
        {%- if message.tool_calls %}{%- for tool_call in message.tool_calls %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>' }}{%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
        {%- endfor %}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "Mistral v1": """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}""",
    "Mistral v3": """{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}{{- "[AVAILABLE_TOOLS] [" }}{{- "]" }}{%- endif %}
        {%- if loop.last and system_message is defined %}{{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}{{- raise_exception("ids have length 9") }}{%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}{{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}{{- raise_exception("unknown role") }}{%- endif %}
{%- endfor %}""",
    "Gemma-2": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "Gemma-3": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {{ '<start_of_turn>' + message['role'] + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}""",
    "Phi-3": """{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' ~ message['content'] ~ '<|end|>\\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "Phi-4": """{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}{% generation %}{{'<|im_start|>assistant<|im_sep|>' ~ message['content'] ~ '<|im_end|>'}}{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
    "Zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  ~ message['content'] ~ eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "DeepSeek": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is none %}{{'<｜tool▁calls▁begin｜>'}}{%- elif message['role'] == 'assistant' and message['content'] is defined %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{{'<｜tool▁output▁begin｜>' + message['content']}}{%- endif %}{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}""",
    "SmolLM2": """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "SmolLM3": """{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- if enable_thinking -%}{%- set reasoning_mode = "/think" -%}{%- else -%}{%- set reasoning_mode = "/no_think" -%}{%- endif -%}
{{- "<|im_start|>system\\n" -}}
{%- if messages[0].role == "system" -%}
  {%- set system_message = messages[0].content -%}
  {%- if "/no_think" in system_message -%}{%- set reasoning_mode = "/no_think" -%}{%- endif -%}
  {%- set custom_instructions = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{%- set today = strftime_now("%Y") -%}
{{- "Today: " ~ today ~ "\\nReasoning Mode: " + reasoning_mode + "\\n" -}}
{%- if custom_instructions -%}{{- custom_instructions + "\\n" -}}{%- endif -%}
{%- if xml_tools or python_tools or tools -%}{{- "### Tools\\n" -}}{%- endif -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}{{ "<|im_start|>" + message.role + "\\n"  + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if reasoning_mode == "/think" -%}{{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}{{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}{%- endif -%}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}{{ "<|im_start|>" + "user\\n"  + content + "<|im_end|>\\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" }}{%- endif -%}""",
    "Granite": """{%- if messages[0]['role'] == 'system' %}
     {%- set system_message = messages[0]['content'] %}
     {%- set loop_messages = messages[1:] %}
 {%- else %}
     {%- set system_message = "Today's Date: " + strftime_now('%Y') + "." %}
     {%- if tools and documents %}{%- set system_message = system_message + " tools and documents" %}{%- elif documents %}{%- set system_message = system_message + " documents" %}{%- endif %}
     {%- set loop_messages = messages %}
 {%- endif %}
 {{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
 {%- if tools %}{{- tools | tojson(indent=4) }}{%- endif %}
 {%- if documents %}{%- for document in documents %}{{- 'Document ' + loop.index0 | string + '\\n' }}{%- endfor %}{%- endif %}
 {%- for message in loop_messages %}
     {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + (message['content'] or '') + '<|end_of_text|>\\n' }}
     {%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson()}}{%- endif %}{{- '<|end_of_role|>' }}{%- endif %}
 {%- endfor %}""",
    "Command-R": """{%- macro document_turn(documents) -%}<|START|>{% for d in documents %}{{ d | tojson }}{% endfor %}{%- endmacro %}{%- macro json_to_python_type(json_spec) %}{%- set basic_type_map = {"string": "str", "number": "float"} %}{{- basic_type_map[json_spec.type] }}{%- endmacro %}{{ bos_token }}{% if documents %}{{ document_turn(documents) }}{% endif %}{{ json_to_python_type({"type": "string"}) }}{% for message in messages %}{% set content = message['content'] %}{% if message.role|lower == 'user' %}{{ '<|USER_TOKEN|>' + content.strip() + '<|END|>' }}{% elif message.role|lower == 'assistant' or message.role|lower == 'chatbot' %}<|CHATBOT_TOKEN|>{% for tc in message.tool_calls or [] %}{{ {"tool_name": tc['function']['name'], "parameters": tc['function']['arguments']}|tojson(indent=4, ensure_ascii=False) }}{% if not loop.last %},{% endif %}{% endfor %}{{ content }}<|END|>{% else %}{{ '<|SYSTEM_TOKEN|>' ~ content ~ '<|END|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|CHATBOT_TOKEN|>{% endif %}""",
    "Yi": """{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}{% endif %}{% if system_message is defined %}{{ system_message }}{% endif %}{% for message in messages %}{% set content = message['content'] %}{% if message['role'] == 'user' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n<|im_start|>assistant\\n' }}{% elif message['role'] == 'assistant' %}{{ content + '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}""",
    "OLMo": """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\\n'  + message['content'] + eos_token + '\\n' }}{% else %}{{ '<|assistant|>\\n'  + message['content'] + eos_token }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}""",
    "Falcon3": """{%- if tools %}{{- '<tools>' + tools|tojson(indent=2) }}{%- endif %}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\\n' ~ message['content'] ~ eos_token ~ '\\n' }}{% else %}{{ '<|assistant|>\\n' ~ message['content'] ~ eos_token }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}""",
    "Vicuna": """{%- set ns = namespace(found=false) -%}{%- for message in messages -%}{%- if message['role'] == 'system' -%}{%- set ns.found = true -%}{%- endif -%}{%- endfor -%}{%- if not ns.found -%}{{- 'A chat.' + ' ' -}}{%- endif %}{%- for message in messages %}{%- if message['role'] == 'system' -%}{{- message['content'] + ' ' -}}{%- else -%}{%- if message['role'] == 'user' -%}{{-'USER: ' + message['content'] + ' '-}}{%- else -%}{{-'ASSISTANT: ' ~ message['content'] ~ '</s>' -}}{%- endif -%}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{-'ASSISTANT: '-}}{%- endif -%}""",
    "Hermes": """{%- macro type_of(spec) %}{%- set names = {"string": "str", "integer": "int"} %}{%- if spec.type is string and spec.type in names %}{{- names[spec.type] }}{%- else %}{{- "Any" }}{%- endif %}{%- endmacro %}{{- bos_token }}{{- '<|im_start|>system\\n' }}{%- if tools is iterable and tools | length > 0 %}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}{{ type_of({'type': 'integer'}) }}{% for k, v in {'a': 1, 'b': 2}|dictsort %}{{ k }}={{ v }};{% endfor %}{%- for message in messages %}{%- if message.role == "user" or message.role == "system" or (message.role == "assistant" and message.tool_calls is not defined) %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- elif message.role == "assistant" %}{{- '<|im_start|>' + message.role }}{%- for tool_call in message.tool_calls %}{{- '\\n<tool_call>\\n' }}{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}{{- {'name': tool_call.name}|tojson + ', "arguments": ' + tool_call.arguments|tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- elif message.role == "tool" %}{%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>tool\\n' }}{%- endif %}{{- message.content }}{%- if not loop.last and loop.nextitem.role == "tool" %}{{- '\\n' }}{%- else %}{{- '<|im_end|>' }}{%- endif %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    # What templates ask of the renderer, one by one.
    "tojson": "{{ messages | tojson }}{{ {'b': 1, 'a': '<é>'} | tojson }}",
    "tojson's options": "{{ messages | tojson(ensure_ascii=True, indent=2) }}"
    "{{ {'b': 1, 'a': [2]} | tojson(separators=(',', ':'), sort_keys=true) }}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}"
    "{{ m.content }}{{ loop.index }}{% endgeneration %}{{ x }}\n{% endfor %}",
    "nothing given": "{{ tools is none }}{{ documents is none }}{{ tools is defined }}"
    "{{ xml_tools is defined }}{{ sep_token }}[{{ pad_token }}]",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "namespace": "{% set ns = namespace({'a': 1}, self=2) %}{% set ns.a = 5 %}{{ ns.a }}{{ ns.self }}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys(['x'], 0) }}{{ dict([('k', 2)]).items() | list }}",
    "null": "{% for m in messages %}{{ 'content' in m }}{{ m.content is defined }}{% endfor %}",
    "blocks": "a\n    {% if true %}\n  b\n    {% endif %}\nc\n\n",
    "filters": "{{ messages | map(attribute='role') | join(',') }}"
    "{{ messages[0].content | trim | upper | replace('&', '+') }}"
    "{{ messages | rejectattr('role', 'equalto', 'system') | list | length }}",
    "mutation": "{% set _ = messages.append({'role': 'x'}) %}",
    "attributes": "{{ messages.__class__ }}",
    "unknown tag": "{% nonsense %}",
}  # fmt: skip


def outcome(renderer):
    """The text, or that there is an error."""
    try:
        return renderer()
    except Exception:
        return "refused"


def reference(template, messages):
    # As transformers' tokenizers do before they render.
    given = [{key: value for key, value in m.items() if value is not None} for m in messages]
    (chat,), _ = theirs.render_jinja_template(
        [given], chat_template=template, add_generation_prompt=True, **SPECIAL
    )
    return chat


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_text_equals_transformers(name):
    template = TEMPLATES[name]
    ours, expected = (
        {key: outcome(lambda: renderer(template, x)) for key, x in CONVERSATIONS.items()}  # noqa: B023
        for renderer in (lambda *given: render(*given, SPECIAL), reference)
    )
    assert ours == expected
    # Refusals of both would be equal too: all templates take one turn, and each takes several.
    refused = [key for key, text in ours.items() if text == "refused"]
    if name in ("mutation", "unknown tag"):
        assert refused == [*CONVERSATIONS]
    else:
        assert "one turn" not in refused
        assert len(refused) <= 5


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% set _ = messages.append(1) %}", "refused the messages: access to attribute 'append'"),
        ("{% set ns = namespace(__x=1) %}", "must not begin with an underscore, got '__x'"),
        ("{{ raise_exception('no robots') }}", "refused the messages: no robots"),
    ],
)
def test_refusals_say_why(template, message):
    with pytest.raises(ModelError, match=message):
        render(template, [USER], {})


def test_an_empty_conversation_is_refused():
    with pytest.raises(ModelError, match="messages must hold at least one message, got none"):
        render("x", [], {})


def test_messages_that_are_no_mappings_are_refused():
    with pytest.raises(ModelError, match=r"messages must be mappings .*, got str: write "):
        render("x", ["hello"], {})
