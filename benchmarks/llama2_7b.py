"""A model folder of Llama2-7B's shape for ``lowbit bench --from-scratch``, where its weights are not at hand.

    python benchmarks/llama2_7b.py FOLDER --data alpaca.json
    lowbit bench --recipe llama2-7b-alpaca --model FOLDER --from-scratch --data alpaca.json --steps 80 \
        --eval-data none --tasks "" --held-out 0 --fresh-caches

Speed and memory depend on shapes and lengths alone: weights are random there. The tokenizer is trained on the data; of
8000 tokens, so that examples get about as long as by Llama's own, whose 32000 tokens serve many languages.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

from lowbit.finetune.data import load_records, prompt

TOKENS = 8000
SPECIAL = ["<unk>", "<s>", "</s>"]


def config(layers=32):
    """https://huggingface.co/meta-llama/Llama-2-7b-hf/blob/main/config.json"""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32,
        max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def tokenizer(records):
    """A byte-level BPE tokenizer trained on the records in their prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False
    )
    bpe.train_from_iterator((prompt(record) + record["output"] for record in records), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", pad_token="<unk>")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", required=True, help="records in Alpaca's format")
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    config(arguments.layers).save_pretrained(arguments.folder)
    tokenizer(load_records(arguments.data)).save_pretrained(arguments.folder)
    print(arguments.folder)


if __name__ == "__main__":
    main()
