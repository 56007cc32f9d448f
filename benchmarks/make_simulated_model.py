"""Writes models/simulated and models/simulated-dflash: configs and a tokenizer, no weights, for `device: simulated`.

The tokenizer reads every byte as one token, so that a prompt's length in tokens is its length in bytes, and can write
short words beside them, so that simulated output is text.

    python benchmarks/make_simulated_model.py models
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

WORDS = """
able about above across act add after again air all along also always and animal answer any are area around ask away
back base be because been before began best better between big bird black blue boat body book both box boy bring brown
build but buy by call came can car care carry cause change check city class clear close cold color come common could
country course cross cut dark day deep did different do dog done door down draw drive dry during each early earth ease
east eat end enough even ever every eye face fact fall family far farm fast father feel feet few field figure find fine
fire first fish five fly follow food foot for force form found four free from front full game gave get girl give go gold
good got great green grow had half hand hard has have he head hear heat help her here high him his hold home horse hot
hour house how idea if in is island it just keep kind king knew know land large last late laugh lead learn leave left
less let letter life light like line list listen little live long look low made main make man many map mark may me mean
men might mile mind minute miss moon more morning most mother mountain move much music must name near need never new
next night no north note nothing notice now number object of off often oh old on once one only open or order other our
out over own page paper part pass pattern people perhaps person picture piece place plain plan plant play point port
pose power press problem produce product pull put question quick rain ran reach read ready real record red remember
rest right river road rock room round rule run said same saw say school science sea second see seem self sentence serve
set several shape she ship short should show side simple since sing sit six size sleep slow small snow so some song
soon sound south spell stand star start state stay step still stood stop story street strong study such sun sure
surface table tail take talk teach tell ten test than that the their them then there these they thing think this those
though thought thousand three through time to together told too took top toward town travel tree true try turn two under
unit until up upon us use usual very voice vowel wait walk want war warm was watch water way we week well went were west
what wheel when where which while white who whole why will wind with wonder wood word work world would write year yes
"""
SPECIAL = ("<bos>", "<eos>", "<mask>")
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHAPE = {  # of a model of 8 billion parameters: it decides what a KV block takes, nothing else
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}


def main(directory: Path) -> None:
    """Write both directories below `directory`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(alphabet)}
    for word in WORDS.split():
        vocab["\u0120" + word] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1], mask_token=SPECIAL[2]
    )
    fast.chat_template = TEMPLATE
    target = directory / "simulated"
    fast.save_pretrained(target)
    common = {**SHAPE, "vocab_size": len(fast), "eos_token_id": fast.eos_token_id, "bos_token_id": fast.bos_token_id}
    _write(
        target,
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 32,
            "tie_word_embeddings": False,
            **common,
        },
    )
    _write(
        directory / "simulated-dflash",
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": 5,
            "num_target_layers": 32,
            "block_size": 16,
            "dflash_config": {"mask_token_id": fast.mask_token_id, "target_layer_ids": [1, 8, 15, 22, 29]},
            **common,
        },
    )


def _write(directory: Path, config: dict[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
