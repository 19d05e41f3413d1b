"""Folders like those of the Hugging Face hub: a tokenizer, small networks with random weights, and
texts.
"""

import warnings
from functools import cache
from pathlib import Path

import datasets
import numpy as np
import torch

WORDS = ["<unk>", "[CLS]", "[SEP]", *(f"w{i}" for i in range(29))]  # 32 tokens


@cache
def folders(root: Path) -> Path:
    """Writes ``tokenizer``, ``gpt2``, ``llama``, ``bert`` and ``texts`` to the folder."""
    warnings.simplefilter("ignore")
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"single": "[CLS] $A [SEP]", "special_tokens": [("[CLS]", 1), ("[SEP]", 2)]}
    words.post_processor = processors.TemplateProcessing(**ends)
    hf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(
        root / "tokenizer"
    )
    torch.manual_seed(0)
    size = {"vocab_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    hf.GPT2LMHeadModel(hf.GPT2Config(**size, n_positions=24)).save_pretrained(root / "gpt2")
    more = {"intermediate_size": 24, "max_position_embeddings": 24}
    hf.LlamaForCausalLM(hf.LlamaConfig(**size, **more, tie_word_embeddings=False)).save_pretrained(
        root / "llama"
    )
    hf.BertForSequenceClassification(hf.BertConfig(**size, **more, num_labels=2)).save_pretrained(
        root / "bert"
    )

    rng = np.random.default_rng(0)
    texts = [
        " ".join(f"w{i % 6 * 4 + j}" for j in rng.integers(0, 8, 2 + i % 11)) for i in range(90)
    ]
    rows = [{"text": text, "label": i % 2, "user": i % 6} for i, text in enumerate(texts)]
    datasets.Dataset.from_list(rows).save_to_disk(root / "texts")
    return root
