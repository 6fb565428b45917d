"""The chat template in a saved folder, rendered by ``transformers`` itself, is the text of our ids."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from k3rl.model.bpe_tokenizer import HuggingFaceTokenizer
from k3rl.rollout.conversation import read_conversation
from k3rl.rollout.formats.xtml import XtmlFormat

transformers = importlib.import_module("transformers")  # of this environment, unknown to the one that checks types


def find(name: str, limit: int = 3) -> str:
    """
    Look an item up.

    Args:
        name: what it is called
        limit: how many at most
    """
    return f"{name} {limit}"


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": 'You keep a "shop" & more.'},
    {"role": "user", "content": "price of é 北京? <|end_of_msg|>", "name": "ann"},
    {
        "role": "assistant",
        "reasoning_content": "look it up",
        "content": "",
        "tool_calls": [
            {"id": "b", "function": {"name": "find", "arguments": {"name": "é", "limit": 2}}},
            {"id": "a", "function": {"name": "find", "arguments": {"name": "北京", "more": [1.5, None, {"x": True}]}}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "2"},
    {"role": "tool", "tool_call_id": "b", "content": "1"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": [{"type": "text", "text": "thank "}, {"type": "text", "text": "you"}]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(["the price of the shop"], trainers.BpeTrainer(initial_alphabet=alphabet))
    backend.add_special_tokens([AddedToken(name, special=True) for name in XtmlFormat.MARKERS])
    path = tmp_path_factory.mktemp("tokenizer")
    HuggingFaceTokenizer(backend.to_str()).save(path)
    return path


@pytest.mark.parametrize("options", [{}, {"thinking": True}, {"thinking": True, "effort": "low"}])
@pytest.mark.parametrize("tools", [[], [find]])
def test_transformers_renders_the_text_of_our_ids(folder: Path, options: dict[str, Any], tools: list[Any]) -> None:
    ours = XtmlFormat(HuggingFaceTokenizer.load(folder), **options)
    (folder / "chat_template.jinja").write_text(ours.chat_template(), encoding="utf-8")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    schemas = [transformers.utils.get_json_schema(tool) for tool in tools]
    text = theirs.apply_chat_template(CONVERSATION, tools=tools or None, add_generation_prompt=True, tokenize=False)
    assert text == ours.tokenizer.decode(ours.render_prompt(read_conversation(CONVERSATION), schemas))
