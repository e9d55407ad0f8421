"""Sentences, a tokenizer and small models, in place of those that scripts fetch."""

from __future__ import annotations

import functools
import random
from typing import Any

import datasets
import evaluate
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [f"{sound}{end}" for sound in ("ba", "du", "fi", "lo", "me", "ra") for end in "bcdfghjklm"]
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]


def tokenizer(*_: Any, **__: Any) -> transformers.PreTrainedTokenizerFast:
    """A token for each of the words."""
    ids = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    made = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[SEP]",
        unk_token="[UNK]",
    )


def glue(_: str, task: str) -> datasets.DatasetDict:
    """One sentence or two, and whether most of their words are of the list's second half."""
    columns = {"mrpc": ("sentence1", "sentence2"), "sst2": ("sentence",)}[task]
    halves, drawn, parts = (WORDS[:30], WORDS[30:]), random.Random(0), {}
    for name, count in (("train", 960), ("validation", 240)):
        rows = []
        for number in range(count):
            label, half = drawn.randrange(2), drawn.randint(3, 9)
            most = drawn.randint(half + 1, 2 * half)
            found = drawn.choices(halves[label], k=most) + drawn.choices(halves[1 - label], k=2 * half - most)
            drawn.shuffle(found)
            texts = [" ".join(found[place :: len(columns)]) for place in range(len(columns))]
            rows.append({"idx": number, "label": label, **dict(zip(columns, texts, strict=True))})
        parts[name] = datasets.Dataset.from_list(rows)
    return datasets.DatasetDict(parts)


def classifier(spread: float, *_: Any, **__: Any) -> transformers.BertForSequenceClassification:
    """A small BERT without pretrained weights, and without dropout, which not all of it takes from torch's function."""
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=len(SPECIAL + WORDS),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
            initializer_range=spread,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def instructions(*_: Any, **__: Any) -> datasets.DatasetDict:
    """Two words of the list, and as many as eight that go on at their distance."""
    drawn, rows = random.Random(0), []
    for _row in range(720):
        first, step, count = drawn.randrange(len(WORDS)), drawn.randint(1, 3), drawn.randint(2, 8)
        found = [WORDS[(first + step * place) % len(WORDS)] for place in range(2 + count)]
        rows.append({"instruction": " ".join(found[:2]), "input": "", "output": " ".join(found[2:])})
    return datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})


def language_model(*_: Any, **__: Any) -> transformers.OPTForCausalLM:
    """A small OPT without pretrained weights, which computes nothing in float32."""
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=len(SPECIAL + WORDS),
            hidden_size=32,
            word_embed_proj_dim=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=64,
            max_position_embeddings=64,
            init_std=0.1,
        )
    )


class Accuracy:
    """What `evaluate` computes for MRPC, but for its F1."""

    def __init__(self, *_: Any) -> None:
        self.right: list[bool] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        self.right += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        right, self.right = self.right, []
        return {"accuracy": sum(right) / len(right)}


def in_place_of_glue(spread: float = 0.02) -> None:
    datasets.load_dataset = glue
    evaluate.load = Accuracy
    transformers.AutoTokenizer.from_pretrained = tokenizer
    transformers.AutoModelForSequenceClassification.from_pretrained = functools.partial(classifier, spread)


def in_place_of_glue_and_frozen() -> None:
    """Where most weights stay, features come of those that are far apart."""
    in_place_of_glue(spread=0.3)


def in_place_of_alpaca() -> None:
    datasets.load_dataset = instructions
    transformers.AutoTokenizer.from_pretrained = tokenizer
    transformers.AutoModelForCausalLM.from_pretrained = language_model
