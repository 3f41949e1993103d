"""`LLM` takes prompts in the same forms as vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton import LLM, SamplingParams
from baton.errors import ConfigError, RequestError
from testkit.inside import engine_of

DEMO = "models/baton-demo-llama"
TEXT = "The for statement"
CHAT = [{"role": "user", "content": TEXT}]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO, kv_cache_memory=8 << 20) as llm:
        yield llm


def test_all_forms_of_a_prompt_give_the_same(llm: LLM) -> None:
    ids = engine_of(llm).tokenizer.encode(TEXT)
    forms: list[Any] = [TEXT, ids, {"prompt": TEXT}, {"prompt_token_ids": ids}]
    alone = [llm.generate(form, GREEDY) for form in forms]
    together = llm.generate([*forms, {"prompt": TEXT, "prompt_token_ids": ids}], GREEDY)
    assert all(len(results) == 1 for results in alone)
    everything = [results[0] for results in alone] + together
    assert {result.outputs[0].text for result in everything} == {everything[0].outputs[0].text}
    assert all(result.prompt_token_ids == ids for result in everything)
    assert [result.prompt for result in together] == [TEXT, None, TEXT, None, TEXT]


@pytest.mark.parametrize("prompt", [{}, {"prompt": TEXT, "multi_modal_data": 1}, {"text": TEXT}])
def test_a_prompt_of_another_form_is_refused(llm: LLM, prompt: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="a prompt has prompt or prompt_token_ids, cache_salt, and nothing else"):
        llm.generate([prompt], GREEDY)


def test_logprobs_of_a_prompt_are_those_of_its_tokens_as_output(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.0, logprobs=0)
    (made,) = llm.generate(TEXT, params)
    assert made.prompt_logprobs is None
    told = made.outputs[0]
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (whole,) = llm.generate({"prompt_token_ids": made.prompt_token_ids + told.token_ids}, scored)
    assert whole.prompt_logprobs is not None
    assert whole.prompt_logprobs[0] is None
    found = [one.logprob for one in whole.prompt_logprobs[len(made.prompt_token_ids) :] if one is not None]
    assert found == pytest.approx([one.logprob for one in told.logprobs], abs=1e-4)


def test_chat_is_the_template_before_generate(llm: LLM) -> None:
    tokenizer = engine_of(llm).tokenizer
    text = tokenizer.apply_chat_template(CHAT)
    (want,) = llm.generate({"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}, GREEDY)
    (have,) = llm.chat(CHAT, GREEDY)
    assert (have.prompt, have.prompt_token_ids) == (text, want.prompt_token_ids)
    assert have.outputs[0].token_ids == want.outputs[0].token_ids
    assert [result.prompt for result in llm.chat([CHAT, CHAT], GREEDY)] == [text, text]
    (open_ended,) = llm.chat(CHAT, GREEDY, add_generation_prompt=False)
    assert open_ended.prompt == tokenizer.apply_chat_template(CHAT, add_generation_prompt=False)


def test_chat_takes_the_template_and_how_it_reads_content(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    def shown(**settings: Any) -> str | None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, False, **settings)
        return output.prompt

    own = llm.chat(CHAT, GREEDY)[0].prompt
    printed = "{{ messages[0].content | tojson }}{{ tools | length if tools }}"
    lists = '[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]'
    assert shown(chat_template=printed) == shown(chat_template=printed, chat_template_content_format="string")
    assert shown(chat_template=printed) == '"a\\nb"'
    assert not caplog.text
    assert shown(chat_template=printed, chat_template_content_format="openai") == lists
    assert "chat_template_content_format is openai, but the chat template seems to read string" in caplog.text
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert shown(chat_template=printed, tools=tools) == '"a\\nb"1'
    loops = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    assert shown(chat_template=loops) == "<a><b>"
    # The model's own template with another format, and then unchanged.
    assert lists.replace('"', "'") in str(shown(chat_template_content_format="openai"))
    assert llm.chat(CHAT, GREEDY)[0].prompt == own
    with pytest.raises(ConfigError, match="chat_template_content_format: 'json' is not one of auto, string, openai"):
        shown(chat_template_content_format="json")
    with pytest.raises(ConfigError, match="chat_template: the chat template does not compile"):
        shown(chat_template="{% if %}")


def test_without_a_tokenizer_ids_go_in_and_come_out(llm: LLM) -> None:
    ids = engine_of(llm).tokenizer.encode(TEXT)
    (want,) = llm.generate([ids], GREEDY)
    with LLM(DEMO, kv_cache_memory=8 << 20, skip_tokenizer_init=True) as bare:
        (have,) = bare.generate([{"prompt_token_ids": ids}], GREEDY)
        assert have.outputs[0].token_ids == want.outputs[0].token_ids
        assert have.outputs[0].text == ""
        assert engine_of(bare).tokenizer.eos_token_ids == engine_of(llm).tokenizer.eos_token_ids
        for form in (TEXT, {"prompt": TEXT}):
            with pytest.raises(RequestError, match="since skip_tokenizer_init is on"):
                bare.generate([form], GREEDY)
        with pytest.raises(RequestError, match="no chat template"):
            bare.chat(CHAT, GREEDY)


def test_the_snippet_of_the_readme_prints_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    snippet = (root / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    exec(compile(snippet, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.strip().splitlines()) >= 2
