"""Chat templates in the styles of published models, a tokenizer that has their tokens, and conversations."""

from tests import folders

TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|eot|>", "[INST]", "[/INST]", "<turn>", "<end>"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}

GENERATION = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{- '\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
HEADERS = """
{{- bos_token }}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '\n\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant\n\n' }}{%- endif %}
"""
INSTRUCTIONS = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}{%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + ((system + '\n\n') if loop.first and system else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TURNS = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<turn>' ~ role ~ '\n' ~ (message.content | trim) ~ '<end>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}
"""
TOOLS = """
{%- set ns = namespace(first=true) %}
{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor -%}
{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
    {%- if ns.first %}{%- set ns.first = false %}{{- '# ' ~ strftime_now('%Y') ~ '\n' }}{%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\n' }}
    {%- if message.reasoning_content is defined %}{{- '<think>' ~ message.reasoning_content ~ '</think>' }}{%- endif %}
    {{- message.content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
PLAIN = """
{% for message in messages %}
{{ message['role'] | capitalize }}: {{ message['content'] }}
{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
Assistant:{% endif %}
"""
STYLES = {
    "generation": GENERATION,
    "headers": HEADERS,
    "instructions": INSTRUCTIONS,
    "turns": TURNS,
    "tools": TOOLS,
    "plain": PLAIN,
}
FORGETS = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and not loop.last %}{{- message.content.split('</think>')[-1] }}
    {%- else %}{{- message.content }}{% endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""A template that drops the thoughts of earlier answers."""

HERMES = """
{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ ('user' if message.role == 'tool' else message.role) }}
    {%- if message.role == 'tool' %}{{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
    {%- elif message.content %}{{- '\n' ~ message.content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function %}
        {{- '\n<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' ~ call.arguments | tojson ~ '}' }}
        {{- '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
LISTED = """
{{- bos_token }}
{%- if tools %}{{- '[INST]' ~ tools | tojson ~ '[/INST]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' ~ message.content ~ '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {{- '<turn>[' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}
            {{- call.function | tojson }}{{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' ~ eos_token }}
    {%- else %}{{- message.content ~ eos_token }}{%- endif %}
{%- endfor %}
"""
BARE = """
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {{- '<|header|>' ~ message.role ~ '\n\n' }}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ call.arguments | tojson ~ '}' }}
    {%- else %}{{- message.content }}{%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant\n\n' }}{%- endif %}
"""
XML = """
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ (message.content or '') }}
    {%- for call in message.tool_calls or [] %}{{- '<function=' ~ call.function.name ~ '>' }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
CALLS = {"hermes": HERMES, "listed": LISTED, "bare": BARE, "xml": XML}
"""Templates that write calls of tools: in tags, as a list behind a special token, as JSON alone, and not as JSON."""

USER, ANSWER = {"role": "user", "content": "the cat sat?"}, {"role": "assistant", "content": "on the mat. 猫 café"}
CONVERSATIONS = {
    "one": [USER, ANSWER],
    "system": [{"role": "system", "content": "be the dog"}, USER, ANSWER],
    "long": [USER, ANSWER, {"role": "user", "content": " why\n"}, {"role": "assistant", "content": "the log\n\n🐱"}],
}


def tokenizer():
    """A byte-level BPE with the special tokens of all styles."""
    made = folders.tokenizer(400)
    made.add_special_tokens(TOKENS)
    return made


def peer(template: str):
    """The same tokenizer in transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=template, **NAMED)
