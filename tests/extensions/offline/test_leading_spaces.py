"""Tokenizers that write a space before each text: what follows other tokens gets none, in training as in one text."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from async_rl.extensions.offline.rows import RowEncoder

CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} "
    "{% generation %}{{ m.content }}{% endgeneration %}</s>{% endif %}{% endfor %}"
)
ROW = [{"role": role, "content": text} for text in ("Q", "A A") for role in ("user", "assistant")]
WAYS = ("first", "always", "never", "normalizer")


def tokenizer_of(way: str, *, marked: bool = False) -> Any:
    """A tokenizer as that of Llama 2 (``normalizer``) or of later models, with a token for each character."""
    characters = [chr(i) for i in range(33, 127)] + ["▁", "\n", "<unk>", "▁A"]
    vocabulary = {character: i for i, character in enumerate(characters)}
    backend: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "A")], unk_token="<unk>"))
    if way == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=way, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always" if way == "normalizer" else way)
    backend.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in ("<s>", "</s>")])
    template = CHAT if marked else CHAT.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("marked", [False, True])
def test_a_conversation_has_the_tokens_of_its_whole_text(way: str, marked: bool):
    tokenizer = tokenizer_of(way, marked=marked)
    (sequence,) = RowEncoder(tokenizer, {}, max_length=1000, section="sft").encode_turns(0, [], ROW, "row")
    assert sequence.token_ids.tolist() == tokenizer.apply_chat_template(ROW, tokenize=True, return_dict=False)
    trained = tokenizer.convert_ids_to_tokens(sequence.token_ids[sequence.loss_mask].tolist())
    assert trained.count("</s>") == 2
    assert "[" not in trained


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_to_plain_text_begins_without_a_space_that_it_has_not(way: str):
    tokenizer = tokenizer_of(way)
    encoder = RowEncoder(tokenizer, {}, max_length=1000, section="sft")
    for prompt, answer in (("Q:", "A"), ("Q:", " A"), ("", "A")):
        found = encoder.encode(0, prompt, answer, "row").token_ids.tolist()
        assert found == [*tokenizer(prompt + answer)["input_ids"], tokenizer.eos_token_id]
