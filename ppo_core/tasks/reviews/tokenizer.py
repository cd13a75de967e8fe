"""The word-level tokenizer that policy and reward model share."""

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ppo_core.tasks.reviews.words import vocabulary

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: each word or mark is a token, and decoding leaves no space before a mark."""
    ids = {token: i for i, token in enumerate((PAD, EOS, UNK, *vocabulary()))}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")]
    )
    # Without a "##" in the vocabulary this decoder only joins words and moves marks up to them.
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
